"""The result of a check, as `check` and `--dry-run` print it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text as Line

Grade = Literal["ok", "note", "wrong"]
GRADE_MARKS: dict[Grade, tuple[str, str]] = {
    "ok": ("ok  ", "green"),
    "note": ("note", "yellow"),
    "wrong": ("FAIL", "red"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    grade: Grade
    text: str
    remedy: str = ""


def print_finding(finding: Finding, console: Console) -> None:
    """Prints a finding and its remedy."""
    mark, colour = GRADE_MARKS[finding.grade]
    console.print(Line.assemble((mark, colour), f" {finding.text}"), soft_wrap=True)
    if finding.remedy:
        console.print(Line(f"     remedy: {finding.remedy}"), soft_wrap=True)
