"""A template that cannot be trusted stops the run before any weight is loaded."""

from __future__ import annotations


class TemplateError(Exception):
    """What is wrong with a tokenizer or its chat template, and how to mend it."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}\n  remedy: {remedy}" if remedy else problem)
