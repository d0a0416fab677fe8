"""The parser of Hermes' and Qwen's calls: a JSON object with `name` and `arguments`, in tags."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, expect_word, parse_json_call, render_json_call
from trainer.parse.json_scan import skip_space


class Hermes(MarkedParser):
    """Parses and renders Hermes calls. `parameters`, which other families write, is a problem here."""

    name = "hermes"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        call, end = parse_json_call(text, skip_space(text, start + len("<tool_call>")), "arguments")
        return ParsedCalls(expect_word(text, end, "</tool_call>")[1], (call,))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(f"<tool_call>\n{render_json_call(call)}\n</tool_call>" for call in calls)
