"""What the families have in common: reasoning comes off first, then calls, and what is left is said."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from gateway.types import EMPTY, ToolCall

from .base import Reply
from .written import Malformed, Member, members, spaced

MAX_PROBLEMS = 8
"""Malformed calls after these are not looked at: that bounds the work, and what the policy has to read."""
_QUOTED = 80
_NAME = re.compile(r"[^\s<>\[\]{}|\"]{1,256}")
"""Nothing that a mark could be made of: a name must not reach over one."""
_EXAMPLE = ToolCall("", "NAME", '{"KEY": "VALUE"}')


@dataclass(frozen=True, slots=True)
class Found:
    """What begins at one mark: calls, what is wrong among them, and where it all ends."""

    end: int
    calls: tuple[ToolCall, ...] = ()
    wrong: tuple[Malformed, ...] = ()


class Family(ABC):
    """A way of writing calls.

    A call within reasoning is never one, whether the reasoning was closed, cut off, or opened by the prompt.
    """

    name: ClassVar[str]

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False) -> None:
        self.schemas = schemas
        """Of each tool by name, its parameters: where arguments are written as fields, they tell numbers from text."""
        self.thinking_open = thinking_open
        """The prompt ends within reasoning, so that the text begins there."""

    @abstractmethod
    def parse(self, text: str) -> Reply:
        """Never raises, whatever the text."""

    @abstractmethod
    def render(self, calls: Sequence[ToolCall]) -> str:
        """How these calls are written; each has a JSON object for arguments."""

    def problem(self, text: str, wrong: Malformed) -> str:
        """In words for the policy, whatever the length of its text."""
        piece = text[wrong.at : wrong.at + _QUOTED]
        place = f"at {piece!r}" if piece else "where the text ends"
        return f"This is not a call: {wrong.reason}, {place}. Write a call so:\n{self.render([_EXAMPLE])}"


class Marked(Family):
    """A family whose calls begin with a mark. It says which marks there are and how one is read; the rest is here."""

    opens: ClassVar[tuple[str, ...]]
    """A call begins with one of these."""
    closes: ClassVar[tuple[str, ...]] = ()
    """A call ends with one of these, which mean nothing alone."""
    silent: ClassVar[tuple[str, ...]] = ()
    """Marks around calls."""
    bare: ClassVar[re.Pattern[str] | None] = None
    """Text that is a call without any mark, where it is the first that is said."""
    thoughts: ClassVar[Mapping[str, str]] = {"<think>": "</think>"}
    """How reasoning opens, and how it closes."""

    @abstractmethod
    def read(self, text: str, at: int) -> Found:
        """What the mark at `at` begins; `Malformed` where that is no call."""

    def parse(self, text: str) -> Reply:
        return _Reading(self, text).reply()

    @cached_property
    def marks(self) -> re.Pattern[str]:
        thoughts = (*self.thoughts, *self.thoughts.values())
        words = {*self.opens, *self.closes, *self.silent, *thoughts}
        return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))


class _Reading:
    """One text being read, from its beginning to its end."""

    def __init__(self, family: Marked, text: str) -> None:
        self.family, self.text = family, text
        self.said: list[list[str]] = [[]]
        """What stands between reasoning and calls, each piece in its parts."""
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.problems: list[str] = []
        self.failed = 0
        self.spoken = False
        self.retracted = 0
        """All before this place was reasoning."""

    def reply(self) -> Reply:
        at = self._opened() if self.family.thinking_open else 0
        while at < len(self.text):
            at = self._step(at)
        reasoning = "\n".join(filter(None, [self.text[: self.retracted].strip(), *self.reasoning]))
        return Reply(self._content(), reasoning, tuple(self.calls), tuple(self.problems))

    def _opened(self) -> int:
        """Reasoning that the prompt opened; some templates' readers give its tag as well."""
        opening = next(iter(self.family.thoughts))
        lead = len(self.text) - len(self.text.lstrip())
        return self._think(lead + len(opening) if self.text.startswith(opening, lead) else 0, opening)

    def _step(self, at: int) -> int:
        if self._is_bare(at):
            return self._call(at, at)
        mark = self.family.marks.search(self.text, at)
        if mark is None:
            return self._say(at, len(self.text))
        self._say(at, mark.start())
        word = mark[0]
        if word in self.family.thoughts:
            return self._think(mark.end(), word)
        if word in self.family.thoughts.values():
            return self._retract(mark)
        if word in self.family.silent:
            return self._seam(mark.end())
        if self.failed >= MAX_PROBLEMS:
            return self._say(mark.start(), mark.end())
        if word in self.family.closes:
            self._note(Malformed(f"{word} ends no call", mark.start()))
            return self._say(mark.start(), mark.end())
        return self._call(mark.start(), mark.end())

    def _is_bare(self, at: int) -> bool:
        first = not (self.spoken or self.calls or self.failed)
        return bool(first and self.family.bare and self.family.bare.match(self.text, at))

    def _call(self, start: int, after: int) -> int:
        try:
            found = self.family.read(self.text, start)
        except Malformed as wrong:
            self._note(wrong)
            return self._say(start, self._resume(after))
        self.calls += found.calls
        for one in found.wrong:
            self._note(one)
        return self._seam(found.end)

    def _resume(self, at: int) -> int:
        """After a malformed call, reading goes on with the next mark: it may be reasoning, or a good call."""
        mark = self.family.marks.search(self.text, at)
        if mark is None:
            return len(self.text)
        return mark.end() if mark[0] in self.family.closes else mark.start()

    def _note(self, wrong: Malformed) -> None:
        self.failed += 1
        if self.failed <= MAX_PROBLEMS:
            self.problems.append(self.family.problem(self.text, wrong))

    def _think(self, at: int, opening: str) -> int:
        closing = self.family.thoughts[opening]
        end = self.text.find(closing, at)
        self.reasoning.append(self.text[at : end if end >= 0 else len(self.text)].strip())
        return self._seam(end + len(closing) if end >= 0 else len(self.text))

    def _retract(self, mark: re.Match[str]) -> int:
        """The end of reasoning whose beginning nobody saw: all that stands before it was reasoning, calls too."""
        self.retracted = mark.start()
        self.reasoning, self.said, self.calls, self.problems, self.spoken = [], [[]], [], [], False
        return self._seam(mark.end())

    def _say(self, start: int, end: int) -> int:
        piece = self.text[start:end]
        self.said[-1].append(piece)
        self.spoken = self.spoken or bool(piece.strip())
        return end

    def _seam(self, at: int) -> int:
        self.said.append([])
        return at

    def _content(self) -> str:
        """White space goes where reasoning or a call stood beside it, and nowhere else."""
        pieces = ["".join(piece) for piece in self.said]
        last = len(pieces) - 1
        pieces = [piece.lstrip() if place else piece for place, piece in enumerate(pieces)]
        pieces = [piece.rstrip() if place < last else piece for place, piece in enumerate(pieces)]
        return "\n".join(filter(None, pieces))


def json_call(text: str, at: int, key: str) -> tuple[ToolCall, int]:
    """The call that the JSON object at `at` makes, its arguments by `key`, and the object's end."""
    fields, end = members(text, at)
    found: dict[str, Member] = {}
    for field in fields:
        if field.key in found and field.key in ("name", key):
            raise Malformed(f'"{field.key}" is given twice', field.at)
        found[field.key] = field
    if "name" not in found:
        raise Malformed('it has no "name"', at)
    arguments = found.get(key)
    if arguments is None and found.keys() - {"name", "type", "id"}:
        raise Malformed(f'it has no "{key}"', at)
    name = found["name"]
    if not name.text.startswith('"'):
        raise Malformed("its name is no string", name.at)
    id = found["id"].text.strip('"') if "id" in found else ""
    written = arguments.text if arguments else "{}"
    return ToolCall(id, named(json.loads(name.text), name.at), written), end


def named(name: str, at: int) -> str:
    """The name, if it can be one."""
    if _NAME.fullmatch(name) and name.isprintable():
        return name
    raise Malformed("a call needs the name of a tool", at)


def word_after(text: str, at: int, *words: str) -> tuple[str, int]:
    """Which of these words stands next, but for white space, and where it ends."""
    begin = spaced(text, at)
    for word in words:
        if text.startswith(word, begin):
            return word, begin + len(word)
    raise Malformed(f"{' or '.join(words)} is missing", begin)


def until(text: str, at: int, word: str) -> tuple[str, int]:
    """The text before the next `word`, and where that ends."""
    end = text.find(word, at)
    if end < 0:
        raise Malformed(f"{word} is missing", at)
    return text[at:end], end + len(word)
