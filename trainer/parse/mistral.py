"""The parsers of Mistral's calls: a mark and a JSON list, or a mark, a name and an object for each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from gateway.types import ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, check_name, read_until, render_json_call
from trainer.parse.json_list import parse_call_list
from trainer.parse.json_scan import find_object_end, skip_space

_OPEN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_LENGTH = 9
"""Mistral's templates reject ids of another length."""


class Mistral(MarkedParser):
    """Parses both formats, and renders the list. Calls without a valid id get one that the templates accept."""

    name = "mistral"
    openers = (_OPEN,)
    reasoning_tags = {"[THINK]": "[/THINK]", "<think>": "</think>"}

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        begin = skip_space(text, start + len(_OPEN))
        is_list = text.startswith("[", begin)
        parsed = parse_call_list(text, begin, "arguments") if is_list else _parse_named_call(text, begin)
        calls = [replace(call, id=_make_id(call, begin, index)) for index, call in enumerate(parsed.calls)]
        return replace(parsed, calls=tuple(calls))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"{_OPEN}[{', '.join(map(_render_item, calls))}]"


class MistralArgs(Mistral):
    """Parses both formats, and renders the later one."""

    name = "mistral_args"

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"{_OPEN}{call.name}{_ARGS}{call.arguments}" for call in calls)


def _render_item(call: ToolCall) -> str:
    return f'{render_json_call(call)[:-1]}, "id": "{call.id}"}}' if call.id else render_json_call(call)


def _parse_named_call(text: str, start: int) -> ParsedCalls:
    head, begin = read_until(text, start, _ARGS)
    name, _, id = head.partition(_ID)
    begin = skip_space(text, begin)
    end = find_object_end(text, begin)
    return ParsedCalls(end, (ToolCall(id.strip(), check_name(name.strip(), start), text[begin:end]),))


def _make_id(call: ToolCall, start: int, index: int) -> str:
    """The call's id if it is valid, or else a hash of its content and place."""
    if len(call.id) == _ID_LENGTH and call.id.isascii() and call.id.isalnum():
        return call.id
    seed = f"{start} {index} {call.name} {call.arguments}"
    return sha256(seed.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_LENGTH]
