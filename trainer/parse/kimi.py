"""Kimi: the id of a call says its name, `functions.NAME:NUMBER`, and its arguments stand behind a mark."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall

from .family import Found, Marked, named, until, word_after
from .written import Malformed, object_end, spaced

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MOST_DIGITS = 6


class Kimi(Marked):
    name = "kimi"
    opens = (_SECTION, _CALL)
    closes = (_CALL_END,)
    silent = (_SECTION_END,)

    def read(self, text: str, at: int) -> Found:
        if text.startswith(_SECTION, at):
            end = at + len(_SECTION)
            word_after(text, end, _CALL)
            return Found(end)
        at += len(_CALL)
        head, begin = until(text, at, _ARGS)
        id = head.strip()
        path, _, number = id.rpartition(":")
        numbered = number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS
        if not (path.startswith("functions.") and numbered):
            raise Malformed("its id is not functions.NAME:NUMBER", at)
        name = named(path.removeprefix("functions."), at)
        begin = spaced(text, begin)
        end = object_end(text, begin)
        return Found(word_after(text, end, _CALL_END)[1], (ToolCall(id, name, text[begin:end]),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        rows = [
            f"{_CALL}functions.{call.name}:{place}{_ARGS}{call.arguments}{_CALL_END}"
            for place, call in enumerate(calls)
        ]
        return f"{_SECTION}{''.join(rows)}{_SECTION_END}"
