"""The parser of Kimi's calls: an id, `functions.NAME:NUMBER`, then the arguments after a mark."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, check_name, expect_word, read_until
from trainer.parse.json_scan import MalformedCall, find_object_end, skip_space

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MAX_DIGITS = 6


class Kimi(MarkedParser):
    """Parses and renders the calls of Kimi models."""

    name = "kimi"
    openers = (_SECTION, _CALL)
    closers = (_CALL_END,)
    ignored_marks = (_SECTION_END,)

    @staticmethod
    def call_id(name: str, number: int) -> str:
        """The id that the model writes for its calls, counted over the conversation."""
        return f"functions.{name}:{number}"

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        if text.startswith(_SECTION, start):
            end = start + len(_SECTION)
            expect_word(text, end, _CALL)
            return ParsedCalls(end)
        id_start = start + len(_CALL)
        id, begin = read_until(text, id_start, _ARGS)
        id = id.strip()
        path, _, number = id.rpartition(":")
        has_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
        if not (path.startswith("functions.") and has_number):
            raise MalformedCall("its id is not functions.NAME:NUMBER", id_start)
        name = check_name(path.removeprefix("functions."), id_start)
        begin = skip_space(text, begin)
        end = find_object_end(text, begin)
        return ParsedCalls(expect_word(text, end, _CALL_END)[1], (ToolCall(id, name, text[begin:end]),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        rendered = [
            f"{_CALL}{self.call_id(call.name, index)}{_ARGS}{call.arguments}{_CALL_END}"
            for index, call in enumerate(calls)
        ]
        return f"{_SECTION}{''.join(rendered)}{_SECTION_END}"
