"""The error of a training step or checkpoint, with a remedy for the operator."""

from __future__ import annotations


class PolicyError(Exception):
    """A step that cannot be made, or a state that cannot be loaded. No weight has changed."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"
