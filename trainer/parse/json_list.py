"""The parsers of calls in a JSON list between marks: Cohere's Command models and Phi-4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from gateway.types import ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, expect_word, parse_json_call, render_json_call
from trainer.parse.json_scan import MalformedCall, find_items, skip_space


def parse_call_list(text: str, start: int, *keys: str) -> ParsedCalls:
    """The calls in a JSON list; `keys` are those that `parse_json_call` takes."""
    starts, end = find_items(text, start)
    calls: list[ToolCall] = []
    malformed: list[MalformedCall] = [] if starts else [MalformedCall("the list of calls is empty", start)]
    for item in starts:
        try:
            calls.append(parse_json_call(text, item, *keys)[0])
        except MalformedCall as error:
            malformed.append(error)
    return ParsedCalls(end, tuple(calls), tuple(malformed))


class Phi4(MarkedParser):
    """Parses and renders the calls of Phi-4."""

    name = "phi4"
    openers = ("<|tool_call|>",)
    closers = ("<|/tool_call|>",)
    name_key: ClassVar[str] = "name"
    arguments_key: ClassVar[str] = "arguments"
    id_key: ClassVar[str] = "id"

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        begin = skip_space(text, start + len(self.openers[0]))
        if not text.startswith("[", begin):
            raise MalformedCall("a JSON list is missing", begin)
        parsed = parse_call_list(text, begin, self.arguments_key, self.name_key, self.id_key)
        return replace(parsed, end=expect_word(text, parsed.end, self.closers[0])[1])

    def render(self, calls: Sequence[ToolCall]) -> str:
        return f"{self.openers[0]}[{', '.join(self._render_item(*row) for row in enumerate(calls))}]{self.closers[0]}"

    def _render_item(self, index: int, call: ToolCall) -> str:
        return render_json_call(call, self.arguments_key, self.name_key)


class Cohere(Phi4):
    """Parses and renders the calls of Command R7B and later, whose answers and reasoning are between marks, too."""

    name = "cohere"
    openers = ("<|START_ACTION|>",)
    closers = ("<|END_ACTION|>",)
    ignored_marks = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    reasoning_tags = {"<|START_THINKING|>": "<|END_THINKING|>"}
    name_key, arguments_key, id_key = "tool_name", "parameters", "tool_call_id"

    def _render_item(self, index: int, call: ToolCall) -> str:
        return f'{{"tool_call_id": "{index}", {super()._render_item(index, call)[1:]}'
