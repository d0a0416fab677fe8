"""The parser of Qwen3-Coder's calls: a function with parameters, written as tags."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall
from trainer.parse.argument_types import build_arguments, split_arguments
from trainer.parse.base import MarkedParser, ParsedCalls, check_name, expect_word, read_until
from trainer.parse.json_scan import MalformedCall


class Qwen3Coder(MarkedParser):
    """Parses and renders Qwen3-Coder's calls. A value ends at the first `</parameter>`, which cannot be escaped."""

    name = "qwen3_coder"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        begin = expect_word(text, start + len("<tool_call>"), "<function=")[1]
        name, index = read_until(text, begin, ">")
        name = check_name(name, begin)
        fields: dict[str, str] = {}
        while True:
            word, index = expect_word(text, index, "<parameter=", "</function>")
            if word == "</function>":
                break
            key, begin = read_until(text, index, ">")
            if key in fields:
                raise MalformedCall(f"the parameter {key[:80]!r} is given twice", index)
            value, index = read_until(text, begin, "</parameter>")
            fields[key] = value.removeprefix("\n").removesuffix("\n")
        end = expect_word(text, index, "</tool_call>")[1]
        arguments = build_arguments(list(fields.items()), self.schemas.get(name))
        return ParsedCalls(end, (ToolCall("", name, arguments),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(_render_call, calls))


def _render_call(call: ToolCall) -> str:
    fields = [f"<parameter={name}>\n{text}\n</parameter>" for name, text in split_arguments(call.arguments)]
    return "\n".join(["<tool_call>", f"<function={call.name}>", *fields, "</function>", "</tool_call>"])
