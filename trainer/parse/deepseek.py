"""The parser of DeepSeek's calls: a name, a separator and a JSON object between marks."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, check_name, expect_word, read_until
from trainer.parse.json_scan import find_object_end, skip_space

# DeepSeek's tokens have a full-width bar, and a block for the space.
_SECTION, _SECTION_END, _CALL, _CALL_END, _SEP = (
    f"<\uff5ctool\u2581{word}\uff5c>" for word in ("calls\u2581begin", "calls\u2581end", "call\u2581begin",
                                                   "call\u2581end", "sep")
)  # fmt: skip


class Deepseek(MarkedParser):
    """Parses the formats of V3 and V3.1, and renders that of V3.1."""

    name = "deepseek"
    openers = (_SECTION, _CALL)
    closers = (_CALL_END,)
    ignored_marks = (_SECTION_END,)

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        if text.startswith(_SECTION, start):
            end = start + len(_SECTION)
            expect_word(text, end, _CALL)
            return ParsedCalls(end)
        name, after_separator = read_until(text, start + len(_CALL), _SEP)
        begin = skip_space(text, after_separator)
        is_v3 = not text.startswith("{", begin)
        if is_v3:
            name, begin = read_until(text, after_separator, "```json")
        name = check_name(name.strip(), after_separator)
        begin = skip_space(text, begin)
        arguments_end = end = find_object_end(text, begin)
        for word in ("```", _CALL_END) if is_v3 else (_CALL_END,):
            end = expect_word(text, end, word)[1]
        return ParsedCalls(end, (ToolCall("", name, text[begin:arguments_end]),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return _render_section([f"{_CALL}{call.name}{_SEP}{call.arguments}{_CALL_END}" for call in calls], "")


class DeepseekV3(Deepseek):
    """Parses the same formats, and renders that of V3 and R1."""

    name = "deepseek_v3"

    def render(self, calls: Sequence[ToolCall]) -> str:
        rows = [f"{_CALL}function{_SEP}{call.name}\n```json\n{call.arguments}\n```{_CALL_END}" for call in calls]
        return _render_section(rows, "\n")


def _render_section(calls: list[str], separator: str) -> str:
    return f"{_SECTION}{separator.join(calls)}{_SECTION_END}"
