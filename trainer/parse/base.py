"""Base classes of parsers: split a policy's text into reasoning, content and tool calls. Nothing is executed here.

Reasoning is separated first, then calls; the rest is content.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

from gateway.types import EMPTY, ToolCall
from trainer.parse.json_scan import MalformedCall, Member, read_members, skip_space


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed turn of the policy."""

    content: str = ""
    """The text without reasoning and calls."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """The calls in order; their arguments are the policy's own text."""
    problems: tuple[str, ...] = ()
    """Malformed calls, each with an explanation for the policy."""


class Parser(Protocol):
    """The interface of a parser."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str) -> Reply:
        """Parses any text; never raises."""
        ...


MAX_PROBLEMS = 8
"""Later malformed calls are not parsed, which bounds the work and what the policy has to read."""
_EXCERPT_LENGTH = 80
_NAME = re.compile(r"[^\s<>\[\]{}|\"]{1,256}")
"""Without characters of marks, so that a name cannot extend over one."""
_EXAMPLE = ToolCall("", "NAME", '{"KEY": "VALUE"}')


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """The calls after one mark, the malformed ones among them, and the index of their end."""

    end: int
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()


class CallParser(ABC):
    """A parser of one model family's format of calls.

    Text in reasoning is never a call, whether the reasoning was closed, truncated, or opened by the prompt.
    """

    name: ClassVar[str]

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] = EMPTY, *, thinking_open: bool = False) -> None:
        self.schemas = schemas
        """Each tool's parameters; for formats that write arguments as text fields, they distinguish types."""
        self.thinking_open = thinking_open
        """The prompt ends in reasoning, so the text starts there."""

    @abstractmethod
    def parse(self, text: str) -> Reply:
        """Parses any text; never raises."""

    @abstractmethod
    def render(self, calls: Sequence[ToolCall]) -> str:
        """The calls in the family's format; their arguments must be JSON objects."""

    def format_problem(self, text: str, malformed: MalformedCall) -> str:
        """An explanation for the policy, of bounded length."""
        excerpt = text[malformed.offset : malformed.offset + _EXCERPT_LENGTH]
        where = f"at {excerpt!r}" if excerpt else "where the text ends"
        return f"This is not a call: {malformed.reason}, {where}. Write a call so:\n{self.render([_EXAMPLE])}"


class MarkedParser(CallParser):
    """A parser of a format whose calls start with a mark. Subclasses list the marks and parse what follows one."""

    openers: ClassVar[tuple[str, ...]]
    """Marks that start a call."""
    closers: ClassVar[tuple[str, ...]] = ()
    """Marks that end a call, and mean nothing alone."""
    ignored_marks: ClassVar[tuple[str, ...]] = ()
    """Marks around calls."""
    bare_call: ClassVar[re.Pattern[str] | None] = None
    """The start of a call without a mark, which may stand only at the beginning of the content."""
    reasoning_tags: ClassVar[Mapping[str, str]] = {"<think>": "</think>"}
    """Opening tags of reasoning, with their closing tags."""

    @abstractmethod
    def parse_call(self, text: str, start: int) -> ParsedCalls:
        """Parses the calls after the mark at `start`. Raises MalformedCall."""

    def parse(self, text: str) -> Reply:
        return _ParseRun(self, text).run()

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """A pattern of all marks and tags."""
        tags = (*self.reasoning_tags, *self.reasoning_tags.values())
        words = {*self.openers, *self.closers, *self.ignored_marks, *tags}
        return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))


class _ParseRun:
    """The state of parsing one text. Methods take an index and return the one to continue at."""

    def __init__(self, parser: MarkedParser, text: str) -> None:
        self.parser, self.text = parser, text
        self.content: list[list[str]] = [[]]
        """The content between reasoning and calls, each section in pieces."""
        self.reasoning: list[str] = []
        self.calls: list[ToolCall] = []
        self.problems: list[str] = []
        self.failures = 0
        self.has_content = False
        self.reasoning_end = 0
        """Everything before this index is reasoning."""

    def run(self) -> Reply:
        index = self._parse_open_reasoning() if self.parser.thinking_open else 0
        while index < len(self.text):
            index = self._step(index)
        reasoning = "\n".join(filter(None, [self.text[: self.reasoning_end].strip(), *self.reasoning]))
        return Reply(self._join_content(), reasoning, tuple(self.calls), tuple(self.problems))

    def _parse_open_reasoning(self) -> int:
        """Parses reasoning that the prompt opened; the text may repeat its tag."""
        tag = next(iter(self.parser.reasoning_tags))
        indent = len(self.text) - len(self.text.lstrip())
        return self._parse_reasoning(indent + len(tag) if self.text.startswith(tag, indent) else 0, tag)

    def _step(self, index: int) -> int:
        if self._is_bare_call(index):
            return self._parse_calls(index, index)
        match = self.parser.marks.search(self.text, index)
        if match is None:
            return self._add_content(index, len(self.text))
        self._add_content(index, match.start())
        mark = match[0]
        if mark in self.parser.reasoning_tags:
            return self._parse_reasoning(match.end(), mark)
        if mark in self.parser.reasoning_tags.values():
            return self._close_unopened_reasoning(match)
        if mark in self.parser.ignored_marks:
            return self._start_section(match.end())
        if self.failures >= MAX_PROBLEMS:
            return self._add_content(match.start(), match.end())
        if mark in self.parser.closers:
            self._record_problem(MalformedCall(f"{mark} ends no call", match.start()))
            return self._add_content(match.start(), match.end())
        return self._parse_calls(match.start(), match.end())

    def _is_bare_call(self, index: int) -> bool:
        is_first = not (self.has_content or self.calls or self.failures)
        return bool(is_first and self.parser.bare_call and self.parser.bare_call.match(self.text, index))

    def _parse_calls(self, start: int, mark_end: int) -> int:
        try:
            parsed = self.parser.parse_call(self.text, start)
        except MalformedCall as malformed:
            self._record_problem(malformed)
            return self._add_content(start, self._find_next_mark(mark_end))
        self.calls += parsed.calls
        for problem in parsed.malformed:
            self._record_problem(problem)
        return self._start_section(parsed.end)

    def _find_next_mark(self, index: int) -> int:
        """Where to continue after a malformed call: the next mark may start reasoning, or a valid call."""
        match = self.parser.marks.search(self.text, index)
        if match is None:
            return len(self.text)
        return match.end() if match[0] in self.parser.closers else match.start()

    def _record_problem(self, malformed: MalformedCall) -> None:
        self.failures += 1
        if self.failures <= MAX_PROBLEMS:
            self.problems.append(self.parser.format_problem(self.text, malformed))

    def _parse_reasoning(self, start: int, tag: str) -> int:
        closing = self.parser.reasoning_tags[tag]
        end = self.text.find(closing, start)
        self.reasoning.append(self.text[start : end if end >= 0 else len(self.text)].strip())
        return self._start_section(end + len(closing) if end >= 0 else len(self.text))

    def _close_unopened_reasoning(self, closing: re.Match[str]) -> int:
        """A closing tag without an opening one: everything before it was reasoning, including calls."""
        self.reasoning_end = closing.start()
        self.reasoning, self.content, self.calls, self.problems, self.has_content = [], [[]], [], [], False
        return self._start_section(closing.end())

    def _add_content(self, start: int, end: int) -> int:
        piece = self.text[start:end]
        self.content[-1].append(piece)
        self.has_content = self.has_content or bool(piece.strip())
        return end

    def _start_section(self, index: int) -> int:
        self.content.append([])
        return index

    def _join_content(self) -> str:
        """Joins the sections, without white space next to reasoning or calls."""
        sections = ["".join(pieces) for pieces in self.content]
        last = len(sections) - 1
        sections = [section.lstrip() if index else section for index, section in enumerate(sections)]
        sections = [section.rstrip() if index < last else section for index, section in enumerate(sections)]
        return "\n".join(filter(None, sections))


def render_json_call(call: ToolCall, arguments_key: str = "arguments", name_key: str = "name") -> str:
    """A call as a JSON object."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"{name_key}": {name}, "{arguments_key}": {call.arguments}}}'


def parse_json_call(
    text: str, start: int, arguments_key: str, name_key: str = "name", id_key: str = "id"
) -> tuple[ToolCall, int]:
    """The call in the JSON object at `start`, and the object's end."""
    all_members, end = read_members(text, start)
    members: dict[str, Member] = {}
    for member in all_members:
        if member.key in members and member.key in (name_key, arguments_key):
            raise MalformedCall(f'"{member.key}" is given twice', member.offset)
        members[member.key] = member
    if name_key not in members:
        raise MalformedCall(f'it has no "{name_key}"', start)
    arguments = members.get(arguments_key)
    if arguments is None and members.keys() - {name_key, "type", id_key}:
        raise MalformedCall(f'it has no "{arguments_key}"', start)
    name = members[name_key]
    if not name.text.startswith('"'):
        raise MalformedCall("its name is no string", name.offset)
    id = members[id_key].text.strip('"') if id_key in members else ""
    return ToolCall(id, check_name(json.loads(name.text), name.offset), arguments.text if arguments else "{}"), end


def check_name(name: str, offset: int) -> str:
    """The name, if it can be a tool's. Raises MalformedCall."""
    if _NAME.fullmatch(name) and name.isprintable():
        return name
    raise MalformedCall("a call needs the name of a tool", offset)


def expect_word(text: str, start: int, *words: str) -> tuple[str, int]:
    """Which of these words comes next, after white space, and its end. Raises MalformedCall."""
    begin = skip_space(text, start)
    for word in words:
        if text.startswith(word, begin):
            return word, begin + len(word)
    raise MalformedCall(f"{' or '.join(words)} is missing", begin)


def read_until(text: str, start: int, word: str) -> tuple[str, int]:
    """The text before the next `word`, and the word's end. Raises MalformedCall."""
    end = text.find(word, start)
    if end < 0:
        raise MalformedCall(f"{word} is missing", start)
    return text[start:end], end + len(word)
