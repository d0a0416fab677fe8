"""Llama 3: a reply that begins with a JSON object of `name` and `parameters` is a call; a python tag may open it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gateway.types import ToolCall

from .family import Found, Marked, json_call
from .written import Malformed, spaced

_TAG = "<|python_tag|>"


class Llama3(Marked):
    """After the tag stands JSON, too: code that some Llamas write there is no call, for nobody runs it."""

    name = "llama3"
    opens = (_TAG,)
    bare = re.compile(r'[ \t\r\n]*+\{\s*+"(?:name"|type"\s*+:\s*+"function")')

    def read(self, text: str, at: int) -> Found:
        begin = at + len(_TAG) if text.startswith(_TAG, at) else at
        call, end = json_call(text, spaced(text, begin), "parameters")
        calls = [call]
        while text.startswith(";", after := spaced(text, end)) and text.startswith("{", spaced(text, after + 1)):
            try:
                call, end = json_call(text, spaced(text, after + 1), "parameters")
            except Malformed as wrong:
                return Found(after + 1, tuple(calls), (wrong,))
            calls.append(call)
        return Found(end, tuple(calls))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(
            f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "parameters": {call.arguments}}}' for call in calls
        )
