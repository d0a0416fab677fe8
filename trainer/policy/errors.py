"""What goes wrong with a policy is told to whoever runs it, with what to do about it."""

from __future__ import annotations


class PolicyError(Exception):
    """A step that cannot be made, or a state that cannot be taken up; no weight was moved by it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"
