"""Hermes, and Qwen beside its coders: a call is JSON with `name` and `arguments`, in tags."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gateway.types import ToolCall

from .family import Found, Marked, json_call, word_after
from .written import spaced


class Hermes(Marked):
    """`parameters`, which other families write, is no call here: the policy is told its own family's word."""

    name = "hermes"
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)

    def read(self, text: str, at: int) -> Found:
        call, end = json_call(text, spaced(text, at + len("<tool_call>")), "arguments")
        return Found(word_after(text, end, "</tool_call>")[1], (call,))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(
            f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}\n'
            "</tool_call>"
            for call in calls
        )
