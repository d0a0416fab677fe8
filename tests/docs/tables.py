"""Reads Markdown tables of pages, so that tests can compare them with the code."""

from __future__ import annotations

import re
from pathlib import Path


def read_table(page: Path, mark: str) -> list[list[str]]:
    """The rows of the table between `<!-- mark -->` and `<!-- /mark -->`, as cells without backticks."""
    match = re.search(rf"<!-- {mark} -->(.*?)<!-- /{mark} -->", page.read_text(encoding="utf-8"), re.DOTALL)
    assert match, f"{page} has no part {mark}"
    lines = [line for line in match[1].splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]
