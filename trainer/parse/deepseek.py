"""DeepSeek: calls stand between marks of their own, with the name before a separator and an object after it."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall

from .family import Found, Marked, named, until, word_after
from .written import object_end, spaced

# In its vocabulary, the bar is full-width and the space is a block, which no other text has.
_SECTION, _SECTION_END, _CALL, _CALL_END, _SEP = (
    f"<\uff5ctool\u2581{word}\uff5c>" for word in ("calls\u2581begin", "calls\u2581end", "call\u2581begin",
                                                   "call\u2581end", "sep")
)  # fmt: skip


class Deepseek(Marked):
    """Reads the forms of V3 and V3.1, and renders that of V3.1."""

    name = "deepseek"
    opens = (_SECTION, _CALL)
    closes = (_CALL_END,)
    silent = (_SECTION_END,)

    def read(self, text: str, at: int) -> Found:
        if text.startswith(_SECTION, at):
            end = at + len(_SECTION)
            word_after(text, end, _CALL)
            return Found(end)
        head, after = until(text, at + len(_CALL), _SEP)
        begin = spaced(text, after)
        fenced = not text.startswith("{", begin)
        if fenced:
            head, begin = until(text, after, "```json")
        name = named(head.strip(), after)
        begin = spaced(text, begin)
        end = after = object_end(text, begin)
        for word in ("```", _CALL_END) if fenced else (_CALL_END,):
            after = word_after(text, after, word)[1]
        return Found(after, (ToolCall("", name, text[begin:end]),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return _section([f"{_CALL}{call.name}{_SEP}{call.arguments}{_CALL_END}" for call in calls], "")


class DeepseekV3(Deepseek):
    """The same, and renders the form of V3 and R1."""

    name = "deepseek_v3"

    def render(self, calls: Sequence[ToolCall]) -> str:
        rows = [f"{_CALL}function{_SEP}{call.name}\n```json\n{call.arguments}\n```{_CALL_END}" for call in calls]
        return _section(rows, "\n")


def _section(rows: list[str], between: str) -> str:
    return f"{_SECTION}{between.join(rows)}{_SECTION_END}"
