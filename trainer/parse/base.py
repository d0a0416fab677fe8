"""A parser reads what a policy wrote: its reasoning, its words, and the calls among them. It runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.types import ToolCall


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy as a person reads it."""

    content: str = ""
    """The words beside reasoning and calls."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """In the order in which they were written; arguments are the policy's own text."""
    problems: tuple[str, ...] = ()
    """What looked like a call and is none, in words that tell the policy how to mend it."""


class Parser(Protocol):
    @property
    def name(self) -> str: ...

    def parse(self, text: str) -> Reply:
        """Never raises, whatever the text."""
        ...
