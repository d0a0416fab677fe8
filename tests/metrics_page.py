"""The page of metrics, read as a table: what each name means, and whether a resumed run measures the same."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"


@cache
def read_meanings() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Patterns of names with what they mean. A part in braces stands for a value; the first name that fits counts."""
    training = PAGE.read_text(encoding="utf-8").partition("## Gateway")[0]
    rows = sorted(re.findall(r"^\| `(.+?)` \| (.+) \|$", training, re.M), key=lambda row: row[0].count("{"))
    return tuple((re.compile(".+".join(map(re.escape, re.split(r"\{\w+\}", name)))), text) for name, text in rows)


def describe_metric(name: str) -> str | None:
    """What a metric means, or None for an unknown one."""
    return next((text for pattern, text in read_meanings() if pattern.fullmatch(name)), None)


def is_repeated(name: str) -> bool:
    """Whether a resumed run measures the same values of a metric as one that was never stopped."""
    return not (describe_metric(name) or "").endswith(" *")
