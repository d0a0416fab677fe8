"""The blocks of a document: what a reader is shown to write, and the lines that a reader is told to type."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATHS = re.compile(r"^# (my_\w+/[\w.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block shows, named in its first line."""
        first = self.text.splitlines()[0]
        return first.removeprefix("# ") if PATHS.match(first) else None


def blocks_of(document: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(document.read_text(encoding="utf-8"))]


def typed(blocks: list[Block]) -> list[str]:
    """Line by line, what is typed into a shell."""
    shells = [block for block in blocks if block.language == "bash" and block.file is None]
    return [line.strip() for block in shells for line in block.text.splitlines() if line.strip()]


def split(line: str) -> tuple[list[str], str | None]:
    """The words of a command, and what its comment says that it prints."""
    said = re.search(r"\s# prints (.+)$", line)
    return shlex.split(line, comments=True), said[1] if said else None


def written(blocks: list[Block], place: Path) -> None:
    """The files that are shown, in a folder."""
    for block in blocks:
        if block.file:
            (place / block.file).parent.mkdir(exist_ok=True)
            (place / block.file).write_text(block.text)
