"""A training script is read, not run: variables that it sets, sums, and the words of one command."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gateway.config.entries import shown
from gateway.errors import ConfigError

BEGINS = re.compile(r"\bmain_(ppo|dapo)\b")
MAIN = re.compile(r"\bmain_(ppo|dapo)(\.py)?$")
"""What is trained with; other programs of verl's do other things."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Stands for what only a shell would know."""
_SET = re.compile(r"\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*(?:declare\s+-a\s+)?([A-Za-z_]\w*)=\((.*)", re.DOTALL)
_ALL = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_END = {"|", ";", "&", "&&", "||", ">", ">>", "2>&1", "<", "2>"}
_USE = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\((?P<run>[^()]*)\)|`(?P<ran>[^`]*)`"
    r"|\$\{(?P<name>\w+)(?::?-(?P<default>(?:[^{}]|\$\{[^{}]*\})*))?\}|\$(?P<bare>[A-Za-z_]\w*|[@*#\d?])"
)
_SUMS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    place: str


def command(file: Path, begins: re.Pattern[str] = BEGINS) -> list[Word]:
    """The words of the script's first command in a line where `begins` is found."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", file=shown(file), remedy="name a script or a YAML file") from None
    reading = _Script(begins, {"PWD": str(Path.cwd())}, {})
    for number, line, goes_on in _logical(lines):
        if reading.read(line, f"{shown(file)}:{number}", goes_on):
            break
    if reading.words:
        return reading.words
    known = "`python3 -m verl.trainer.main_ppo` and no `swift rlhf`"
    raise ConfigError(f"holds no {known}", file=shown(file), remedy="name the file that does")


@dataclass(slots=True)
class _Script:
    """What is known by some line of a script."""

    begins: re.Pattern[str]
    known: dict[str, str]
    arrays: dict[str, list[Word]]
    words: list[Word] = field(default_factory=list)
    """Of the command."""
    _open: str | None = None
    """The array whose words are being read."""

    def read(self, line: str, place: str, goes_on: bool) -> bool:
        """Whether the command is over."""
        if self._open is not None or (not self.words and (found := _ARRAY.fullmatch(line))):
            if self._open is None and found:
                self._open, line = found[1], found[2]
                self.arrays[self._open] = []
            self._fill(line, place)
            return False
        begins = self.begins.search(line)
        if not self.words and not begins and (found := _SET.fullmatch(line)):
            self.known[found[1]] = " ".join(_split(_filled(found[2], self.known), place))
            return False
        if not self.words and not begins:
            return False
        cut = self._cut(line, place)
        end = next((at for at, word in enumerate(cut) if word.text in _END), len(cut))
        self.words += cut[:end]
        return not goes_on or end < len(cut)

    def _fill(self, line: str, place: str) -> None:
        name = self._open or ""
        if line.rstrip().endswith(")"):
            line, self._open = line.rstrip()[:-1], None
        self.arrays[name] += self._cut(line, place)

    def _cut(self, line: str, place: str) -> list[Word]:
        words: list[Word] = []
        for text in _split(_filled(line, self.known), place):
            found = _ALL.fullmatch(text)
            words += self.arrays.get(found[1], []) if found else [Word(text, place)]
        return words


def _logical(lines: list[str]) -> Iterator[tuple[int, str, bool]]:
    """Each line with its number, and whether the next one goes on with it; a text over several lines is one."""
    left = iter(enumerate(lines, 1))
    for number, line in left:
        text = line.strip()
        if (
            _SET.match(text)
            and text[-1] != "\\"
            and _is_open(text)
            and not _is_open("\n".join([text, *lines[number:]]))
        ):
            while _is_open(text):
                text += "\n" + next(left)[1].rstrip()
        if text.startswith("#") or not text:
            continue
        bare = text.rstrip("\\").rstrip()
        yield number, bare, bare != text


def _is_open(text: str) -> bool:
    """Whether a quotation in it is not closed."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def _split(text: str, place: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        remedy = "close the quotation on the same line"
        raise ConfigError(f"cannot be read as a shell would: {error}", file=place, remedy=remedy) from None


def _filled(text: str, known: Mapping[str, str]) -> str:
    """With its variables in place; what stands in single quotes stays."""
    parts = re.split(r"('[^']*')", text)
    return "".join(part if part.startswith("'") else _USE.sub(lambda found: _use(found, known), part) for part in parts)


def _use(found: re.Match[str], known: Mapping[str, str]) -> str:
    if found["sum"] is not None:
        return _sum(_filled(found["sum"], known), known)
    if found["run"] is not None or found["ran"] is not None:
        return known["PWD"] if (found["run"] or found["ran"]).strip() == "pwd" else UNKNOWN
    name = found["name"] or found["bare"]
    if name in ("@", "*"):
        return ""
    default = found["default"]
    said = known.get(name, os.environ.get(name))
    return said if said else (UNKNOWN if default is None else _filled(default, known))


def _sum(text: str, known: Mapping[str, str]) -> str:
    try:
        return str(_counted(ast.parse(text.strip(), mode="eval").body, known))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return UNKNOWN


def _counted(node: ast.AST, known: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if known.get(name, "").isdigit():
            return int(known[name])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
            return _SUMS[type(op)](_counted(left, known), _counted(right, known))
    raise ValueError(node)
