"""The result of a check, as `check` and `--dry-run` print it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text as Line

from gateway.plural import format_count

Grade = Literal["ok", "note", "wrong"]
GRADE_MARKS: dict[Grade, tuple[str, str]] = {
    "ok": ("ok  ", "green"),
    "note": ("note", "yellow"),
    "wrong": ("FAIL", "red"),
}


def count_problems(findings: Iterable[Finding], none: str) -> str:
    """The verdict: how many problems there are, or `none`."""
    wrong = sum(finding.grade == "wrong" for finding in findings)
    return f"{format_count(wrong, 'problem')} to fix" if wrong else none


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
