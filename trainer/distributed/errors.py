"""Errors of ranks."""

from __future__ import annotations

from trainer.policy.settings import PolicyError


class RankError(PolicyError):
    """The ranks cannot train together. The message names the one that differs, failed, ended or is stuck."""


class LostRankError(RankError):
    """A rank was lost while the run was under way, which another try may not meet: launchers start the job again."""

    exit_code = 1


class ReportedRankError(RankError):
    """A rank's own error that rank 0 knows of, and tells."""
