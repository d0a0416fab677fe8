"""A word of a command with the place where it was written, and a command that a script launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

UNKNOWN_TEXT = "\N{REPLACEMENT CHARACTER}"
"""Stands for text that is not known, such as the output of a command that is not run."""


MAX_SHOWN = 200


def show_text(text: str) -> str:
    """Text of a script for an error: short, and without characters that a terminal would act on."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command with the place where it was written."""

    text: str
    place: str


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that a script launches, with its environment variables."""

    words: Sequence[Word]
    place: str
    environment: Mapping[str, Word] = field(default_factory=dict)
    """The values of its environment variables."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The words without their places."""
        return tuple(word.text for word in self.words)

    @property
    def summary(self) -> str:
        """The first words, for messages."""
        texts = self.texts
        return " ".join(texts[:4]) + (" ..." if len(texts) > 4 else "")
