"""Qwen's coders: a call is a function with parameters, all of them tags, and a value is the text between two."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall

from .family import Found, Marked, named, until, word_after
from .fields import arguments_of, fields_of
from .written import Malformed


class Qwen3Coder(Marked):
    """A value ends with the first `</parameter>`: the format has no way to write that word in one."""

    name = "qwen3_coder"
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)

    def read(self, text: str, at: int) -> Found:
        begin = word_after(text, at + len("<tool_call>"), "<function=")[1]
        name, at = until(text, begin, ">")
        name = named(name, begin)
        fields: dict[str, str] = {}
        while True:
            word, at = word_after(text, at, "<parameter=", "</function>")
            if word == "</function>":
                break
            key, begin = until(text, at, ">")
            if key in fields:
                raise Malformed(f"the parameter {key[:80]!r} is given twice", at)
            value, at = until(text, begin, "</parameter>")
            fields[key] = value.removeprefix("\n").removesuffix("\n")
        end = word_after(text, at, "</tool_call>")[1]
        arguments = arguments_of(list(fields.items()), self.schemas.get(name))
        return Found(end, (ToolCall("", name, arguments),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(_rendered, calls))


def _rendered(call: ToolCall) -> str:
    fields = [f"<parameter={name}>\n{text}\n</parameter>" for name, text in fields_of(call.arguments)]
    return "\n".join(["<tool_call>", f"<function={call.name}>", *fields, "</function>", "</tool_call>"])
