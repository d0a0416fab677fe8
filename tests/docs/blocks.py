"""Parses the fenced blocks of a Markdown page, and the commands of its shell blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'\btitle="([^"]+)"')
NAMED = re.compile(r"^(?:#|//|--) ((?:[\w.-]+/)*[\w-]+\.\w+)$")
PRINTS = re.compile(r"\s# prints (.+)$")
SHELL_SYNTAX = re.compile(r"\$\(|\$\w|\$\{|[|><;&]|^\w+=|^(for|if|while|export|cd) ", re.MULTILINE)

EXECUTED = ("bash", "python", "yaml", "json", "jsonl")
"""Run or validated by the harness."""
SHOWN = ("text", "console", "toml", "dockerfile", "makefile", "diff", "xml", "markdown", "bibtex")
"""Only shown. A `console` block is a command that the tests cannot run, such as `docker build`."""

OUTPUT = "Output"
"""The title of a `text` block that shows what the block before it prints; `...` stands for anything."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    title: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the block shows: its title, or a comment in its first line."""
        if self.title == OUTPUT:
            return None
        if self.title is not None:
            return self.title
        found = NAMED.match(self.text.splitlines()[0]) if self.text else None
        return found[1] if found else None

    @property
    def is_output(self) -> bool:
        return self.title == OUTPUT

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block: one a line, or more lines where quotes or a backslash go on."""
        return list(_commands(self.text))

    @property
    def needs_shell(self) -> bool:
        """Whether the block uses pipes, variables or redirection, so that only a shell can run it."""
        return any(SHELL_SYNTAX.search(_without_quotes(command)) for command in self.commands)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    return [_block(name, text, found) for found in FENCE.finditer(text)]


def split_command(command: str) -> tuple[list[str], str | None]:
    """The words of a command, and what its comment says that it prints."""
    prints = PRINTS.search(command)
    return shlex.split(command, comments=True), prints[1].strip() if prints else None


def pages() -> list[Path]:
    """The README and every page below docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _block(page: str, text: str, found: re.Match[str]) -> Block:
    language, _, rest = found["info"].strip().partition(" ")
    title = TITLE.search(rest)
    line = text.count("\n", 0, found.start()) + 1
    return Block(page, line, language, dedent(found["text"]), title[1] if title else None)


def _commands(text: str) -> Iterator[str]:
    pending: list[str] = []
    for line in text.splitlines():
        pending.append(line)
        command = "\n".join(pending)
        if line.endswith("\\") or not _is_complete(command):
            continue
        pending = []
        if shlex.split(command, comments=True):
            yield command.strip()
    assert not pending, f"a quote is not closed: {pending}"


def _is_complete(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def _without_quotes(command: str) -> str:
    """The command without quoted strings and its comment, for a look at its syntax."""
    bare = re.sub(r"'[^']*'", "''", command)
    return re.sub(r"(^|\s)#.*$", "", re.sub(r'"(\\.|[^"$])*"', '""', bare), flags=re.MULTILINE)
