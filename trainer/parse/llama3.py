"""The parser of Llama 3's calls: a reply that starts with a JSON object of `name` and `parameters`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.types import ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, parse_json_call, render_json_call
from trainer.parse.json_scan import MalformedCall, skip_space

_TAG = "<|python_tag|>"


class Llama3(MarkedParser):
    """Parses and renders Llama 3's calls. The Python tag may precede JSON; code after it is not a call."""

    name = "llama3"
    openers = (_TAG,)
    bare_call = re.compile(r'[ \t\r\n]*+\{\s*+"(?:name"|type"\s*+:\s*+"function")')

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        begin = start + len(_TAG) if text.startswith(_TAG, start) else start
        call, end = parse_json_call(text, skip_space(text, begin), "parameters")
        calls = [call]
        while text.startswith(";", semicolon := skip_space(text, end)):
            begin = skip_space(text, semicolon + 1)
            if not text.startswith("{", begin):
                break
            try:
                call, end = parse_json_call(text, begin, "parameters")
            except MalformedCall as malformed:
                return ParsedCalls(semicolon + 1, tuple(calls), (malformed,))
            calls.append(call)
        return ParsedCalls(end, tuple(calls))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "; ".join(render_json_call(call, "parameters") for call in calls)
