"""Mistral: a mark and a JSON list of calls; its later models write a mark, a name and an object for each call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256

from gateway.types import ToolCall

from .family import Found, Marked, json_call, named, until
from .written import Malformed, items, object_end, spaced

_OPEN, _ARGS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_LENGTH = 9
"""Mistral's templates refuse any other."""


class Mistral(Marked):
    """Reads both forms, and renders the list. A call without an id of its own gets one that the template takes."""

    name = "mistral"
    opens = (_OPEN,)
    thoughts = {"[THINK]": "[/THINK]", "<think>": "</think>"}

    def read(self, text: str, at: int) -> Found:
        begin = spaced(text, at + len(_OPEN))
        found = _listed(text, begin) if text.startswith("[", begin) else _named(text, begin)
        return replace(found, calls=tuple(replace(call, id=_id(call, begin, i)) for i, call in enumerate(found.calls)))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"{_OPEN}[{', '.join(map(_row, calls))}]"


class MistralArgs(Mistral):
    """The same, and renders the later form."""

    name = "mistral_args"

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"{_OPEN}{call.name}{_ARGS}{call.arguments}" for call in calls)


def _row(call: ToolCall) -> str:
    id = f', "id": "{call.id}"' if call.id else ""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}{id}}}'


def _listed(text: str, at: int) -> Found:
    starts, end = items(text, at)
    calls: list[ToolCall] = []
    wrong: list[Malformed] = [] if starts else [Malformed("the list of calls is empty", at)]
    for start in starts:
        try:
            calls.append(json_call(text, start, "arguments")[0])
        except Malformed as error:
            wrong.append(error)
    return Found(end, tuple(calls), tuple(wrong))


def _named(text: str, at: int) -> Found:
    head, begin = until(text, at, _ARGS)
    name, _, id = head.partition(_ID)
    begin = spaced(text, begin)
    end = object_end(text, begin)
    return Found(end, (ToolCall(id.strip(), named(name.strip(), at), text[begin:end]),))


def _id(call: ToolCall, at: int, place: int) -> str:
    if len(call.id) == _ID_LENGTH and call.id.isascii() and call.id.isalnum():
        return call.id
    seed = f"{at} {place} {call.name} {call.arguments}"
    return sha256(seed.encode("utf-8", "surrogatepass")).hexdigest()[:_ID_LENGTH]
