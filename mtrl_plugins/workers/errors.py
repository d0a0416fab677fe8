"""Errors of rollout workers that end the run."""

from __future__ import annotations

from gateway.errors import GatewayError


class WorkersError(GatewayError):
    """No rollout worker can play."""


class LateWorkersError(WorkersError):
    """Rollout workers have not connected in time. Its exit code has launchers start the ranks again."""

    exit_code = 1


class TakenPortError(WorkersError):
    """Something else listens where the launcher's workers connect. With another start they choose another port."""

    exit_code = 1
