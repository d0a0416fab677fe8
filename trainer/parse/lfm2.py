"""The parser of LFM2's calls: a list of Python calls between marks, which is read and never evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.types import ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, check_name, expect_word
from trainer.parse.json_scan import MalformedCall, skip_space
from trainer.parse.python_scan import format_call, read_call

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2(MarkedParser):
    """Parses and renders the calls of LFM2 and LFM2.5."""

    name = "lfm2"
    openers = (_OPEN,)
    closers = (_CLOSE,)

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        index = expect_word(text, start + len(_OPEN), "[")[1]
        calls: list[ToolCall] = []
        while not text.startswith("]", index := skip_space(text, index)):
            call, end = read_call(text, index)
            calls.append(replace(call, name=check_name(call.name, index)))
            if expect_word(text, end, ",", "]")[0] == "]":
                index = skip_space(text, end)
                break
            index = expect_word(text, end, ",")[1]
        if not calls:
            raise MalformedCall("the list of calls is empty", start)
        return ParsedCalls(expect_word(text, index + 1, _CLOSE)[1], tuple(calls))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"{_OPEN}[{', '.join(map(format_call, calls))}]{_CLOSE}"
