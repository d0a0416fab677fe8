"""Shows two texts one above the other, with a mark under their first difference."""

from __future__ import annotations

from trainer.ledger import common_length

BEFORE, AFTER = 40, 60
"""Characters that are shown before and after the first difference."""


def mark_difference(first_name: str, first: str, second_name: str, second: str) -> str:
    """Three indented lines: both texts from shortly before their first difference on, and the mark under it."""
    index = common_length(first, second)
    start = max(0, index - BEFORE)
    common = ("..." if start else "") + _escape(first[start:index])
    width = max(len(first_name), len(second_name))
    lines = [
        f"{name:{width}}  {common}{_escape(text[index : index + AFTER])}{'...' if len(text) > index + AFTER else ''}"
        for name, text in ((first_name, first), (second_name, second))
    ]
    mark = f"{'':{width}}  {' ' * len(common)}^ here they differ"
    return "".join(f"\n    {line}" for line in (*lines, mark))


def _escape(text: str) -> str:
    """The text on one line."""
    return text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
