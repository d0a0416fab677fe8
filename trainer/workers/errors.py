"""Errors of rollout workers that end the run."""

from __future__ import annotations

from gateway.errors import GatewayError


class WorkersError(GatewayError):
    """No rollout worker can play: they are late, or have lost what they need. Its exit code has launchers start the
    ranks again."""

    exit_code = 1


class TakenPortError(WorkersError):
    """Something else listens where the launcher's workers connect. With another start they choose another port."""
