"""Tells, while a turn is written, which of its content and reasoning no later text can change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from trainer.parse.base import MarkedParser, Parser
from trainer.parse.plain import PlainText


@dataclass
class ReplyStream:
    """Reads a turn piece by piece. What it cannot be sure of is held back until the turn is parsed as a whole.

    From a call on, everything is held back. So it is with parsers of users, and with formats without marks.
    """

    parser: Parser
    closing: str = ""
    """A mark after an answer, which belongs to neither part."""
    content: str = ""
    """The content so far: the beginning of the final one."""
    reasoning: str = ""
    _rest: str = ""
    """Text that was not read yet."""
    _space: str = ""
    """White space that is part of the content or the reasoning only if more of it follows."""
    _is_new_section: bool = False
    _closing_tag: str = ""
    _read: Callable[[], bool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._read = self._hold
        if isinstance(self.parser, PlainText):
            self._read = self._take_all
        elif isinstance(self.parser, MarkedParser) and type(self.parser).parse is MarkedParser.parse:
            words = {*self.parser.openers, *self.parser.closers, *self.parser.ignored_marks, self.closing}
            tags = self.parser.reasoning_tags
            self._words = tuple(words.union(tags, tags.values()) - {""})
            self._marks = _any_of(self._words)
            self._read = self._begin if self.parser.thinking_open else self._read_content

    def feed(self, text: str) -> None:
        """Reads more of the turn."""
        self._rest += text
        while self._read():
            pass

    def _hold(self) -> bool:
        self._rest = ""
        return False

    def _take_all(self) -> bool:
        self.content, self._rest = self.content + self._rest, ""
        return False

    def _begin(self) -> bool:
        """The start of a turn that begins in reasoning; it may repeat the tag."""
        tag, text = next(iter(self._tags)), self._rest.lstrip()
        if len(text) < len(tag) and tag.startswith(text):
            return False
        self._open_reasoning(tag, text.removeprefix(tag))
        return True

    @property
    def _tags(self) -> dict[str, str]:
        return dict(self.parser.reasoning_tags) if isinstance(self.parser, MarkedParser) else {}

    def _open_reasoning(self, tag: str, rest: str) -> None:
        if self.content:  # A protocol's parts come in their order: reasoning, then content.
            self._read = self._hold
            return
        self._closing_tag, self._rest, self._space = self._tags[tag], rest, ""
        self._is_new_section, self._read = True, self._read_reasoning

    def _read_reasoning(self) -> bool:
        end = self._rest.find(self._closing_tag)
        closed = self._rest.find(self.closing) if self.closing else -1
        if closed >= 0 and (end < 0 or closed < end):
            self._read = self._hold
            return True
        if end < 0:
            count = len(self._rest) - _held_suffix(self._rest, (self._closing_tag, self.closing))
            self.reasoning += self._take(count, self.reasoning)
            return False
        self.reasoning += self._take(end, self.reasoning)
        self._rest, self._space = self._rest[len(self._closing_tag) :], ""
        self._is_new_section, self._read = True, self._read_content
        return True

    def _read_content(self) -> bool:
        mark = self._marks.search(self._rest)
        if mark and self._may_grow(mark):
            end, mark = mark.start(), None
        else:
            end = mark.start() if mark else len(self._rest) - _held_suffix(self._rest, self._words)
        if self._may_be_bare_call(end, found=mark is not None):
            return False
        self.content += self._take(end, self.content)
        if mark is None:
            return False
        rest, tag = self._rest[len(mark[0]) :], mark[0]
        if tag in self._tags:
            self._open_reasoning(tag, rest)
        elif isinstance(self.parser, MarkedParser) and tag in self.parser.ignored_marks and tag != self.closing:
            self._rest, self._space, self._is_new_section = rest, "", True
        else:
            self._read = self._hold
        return True

    def _may_grow(self, mark: re.Match[str]) -> bool:
        """Whether more text can make a longer mark of this one."""
        text = self._rest[mark.start() :]
        return any(len(word) > len(text) and word.startswith(text) for word in self._words)

    def _may_be_bare_call(self, end: int, *, found: bool) -> bool:
        if not isinstance(self.parser, MarkedParser) or self.parser.bare_call is None or self.content:
            return False
        start = self._rest[:end].lstrip()
        if start.startswith("{"):
            self._read = self._hold
        return start.startswith("{") or (not start and not found)

    def _take(self, count: int, before: str) -> str:
        """The next characters without white space at the end, after what separates sections."""
        text, self._rest = self._space + self._rest[:count], self._rest[count:]
        text = text.lstrip() if self._is_new_section else text
        kept = text.rstrip()
        if not kept:
            self._space = text
            return ""
        self._space = text[len(kept) :]
        joint = "\n" if self._is_new_section and before else ""
        self._is_new_section = False
        return joint + kept


def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if words else r"(?!)")


def _held_suffix(text: str, words: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that can become one of the words."""
    longest = max(map(len, words), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        end = text[-count:]
        if any(word.startswith(end) for word in words):
            return count
    return 0
