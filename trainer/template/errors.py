"""The error of a tokenizer or chat template that cannot be used; raised before any weights are loaded."""

from __future__ import annotations

from gateway.errors import OperatorError

OTHER_TEMPLATE = "copy the chat template to a file, change what is named, and set `template.chat_template` to this file"
"""The remedy where no setting changes what a template does."""


class TemplateError(OperatorError):
    """A problem of a tokenizer or its chat template, and the remedy."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}\n  remedy: {remedy}" if remedy else problem)
