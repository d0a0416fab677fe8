"""The parsers of calls in `invoke` tags: MiniMax, and Muse Glimmer, whose turns consist of several messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

from gateway.types import ToolCall
from trainer.parse.argument_types import build_arguments, split_arguments
from trainer.parse.base import (
    MAX_PROBLEMS,
    CallParser,
    MarkedParser,
    ParsedCalls,
    Reply,
    check_name,
    expect_word,
    read_until,
)
from trainer.parse.json_scan import MalformedCall


class MiniMax(MarkedParser):
    """Parses and renders MiniMax's calls. A value ends at the first closing tag, which cannot be escaped."""

    name = "minimax"
    openers = ("<minimax:tool_call>",)
    closers = ("</minimax:tool_call>",)
    prefix: ClassVar[str] = ""
    """What the names of the inner tags start with."""

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        invoke, closer = f'<{self.prefix}invoke name="', self.closers[0]
        index = expect_word(text, start + len(self.openers[0]), invoke)[1]
        calls: list[ToolCall] = []
        while True:
            call, end = self._parse_invoke(text, index)
            calls.append(call)
            word, index = expect_word(text, end, invoke, closer)
            if word == closer:
                return ParsedCalls(index, tuple(calls))

    def _parse_invoke(self, text: str, start: int) -> tuple[ToolCall, int]:
        parameter = f"{self.prefix}parameter"
        name, index = read_until(text, start, '">')
        name = check_name(name, start)
        fields: dict[str, str] = {}
        while True:
            word, index = expect_word(text, index, f'<{parameter} name="', f"</{self.prefix}invoke>")
            if word.startswith("</"):
                return ToolCall("", name, build_arguments(list(fields.items()), self.schemas.get(name))), index
            key, begin = read_until(text, index, '">')
            if key in fields:
                raise MalformedCall(f"the parameter {key[:80]!r} is given twice", index)
            fields[key], index = read_until(text, begin, f"</{parameter}>")

    def render(self, calls: Sequence[ToolCall]) -> str:
        rows = [self._render_invoke(call) for call in calls]
        return "\n".join([self.openers[0], *rows, self.closers[0]])

    def _render_invoke(self, call: ToolCall) -> str:
        tag = f"{self.prefix}parameter"
        fields = [f'<{tag} name="{name}">{text}</{tag}>' for name, text in split_arguments(call.arguments)]
        return "\n".join([f'<{self.prefix}invoke name="{call.name}">', *fields, f"</{self.prefix}invoke>"])


class _Atem(MiniMax):
    name = "atem"
    openers = ("<atem:function_calls>",)
    closers = ("</atem:function_calls>",)
    prefix = "atem:"
    reasoning_tags = {}


_START, _MESSAGE = "<|start|>assistant", "<|message|>"
_HEADER = re.compile(r"\s*+(?:<\|start\|>assistant)?+\s*+(?:to=([^\s<]{1,256}+))?+\s*+<\|message\|>")
_MESSAGE_END = re.compile(r"<\|(?:eom|eot)\|>|(?=<\|start\|>)")


class Muse(CallParser):
    """Parses and renders Muse Glimmer's turns: a message `to=self` is reasoning, one to a tool has its call."""

    name = "muse"

    def parse(self, text: str) -> Reply:
        inner = _Atem(self.schemas)
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        problems: list[str] = []
        for is_thought, body in self._split(text):
            if is_thought:
                reasoning.append(body.strip())
                continue
            reply = inner.parse(body) if len(problems) < MAX_PROBLEMS else Reply(body)
            content.append(reply.content)
            calls += reply.calls
            problems += reply.problems[: MAX_PROBLEMS - len(problems)]
        pieces = content if len(content) == 1 else [piece.strip() for piece in content]
        text, thoughts = ("\n".join(filter(None, part)) for part in (pieces, reasoning))
        return Reply(text, thoughts, tuple(calls), tuple(problems))

    def _split(self, text: str) -> Iterator[tuple[bool, str]]:
        """The bodies of the messages, and whether each is reasoning; what has no header is content."""
        index, is_thought = 0, self.thinking_open
        while index < len(text):
            header = None if is_thought else _HEADER.match(text, index)
            begin = header.end() if header else index
            # The mark that starts a message without a valid header is content, so that each step moves on.
            end = _MESSAGE_END.search(text, begin if header or begin == 0 else begin + 1)
            yield is_thought or bool(header and header[1] == "self"), text[begin : end.start() if end else len(text)]
            index, is_thought = max(end.end() if end else len(text), index + 1), False

    def render(self, calls: Sequence[ToolCall]) -> str:
        inner = _Atem(self.schemas)
        rows = [f" to={call.name}{_MESSAGE}{inner.render([call])}" for call in calls]
        return f"<|eom|>{_START}".join(rows)
