"""The parser of GLM's calls: a name, then keys and values in tags."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall
from trainer.parse.argument_types import build_arguments, split_arguments
from trainer.parse.base import MarkedParser, ParsedCalls, check_name, expect_word, read_until
from trainer.parse.json_scan import MalformedCall


class Glm(MarkedParser):
    """Parses and renders GLM's calls. A value ends at the first `</arg_value>`, as the format cannot escape it."""

    name = "glm"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        begin = start + len("<tool_call>")
        index = text.find("<", begin)
        if index < 0:
            raise MalformedCall("</tool_call> is missing", begin)
        name = check_name(text[begin:index].strip(), begin)
        fields: dict[str, str] = {}
        while True:
            word, index = expect_word(text, index, "<arg_key>", "</tool_call>")
            if word == "</tool_call>":
                break
            key, key_end = read_until(text, index, "</arg_key>")
            if key in fields:
                raise MalformedCall(f"the argument {key[:80]!r} is given twice", index)
            fields[key], index = read_until(text, expect_word(text, key_end, "<arg_value>")[1], "</arg_value>")
        return ParsedCalls(index, (ToolCall("", name, build_arguments(list(fields.items()), self.schemas.get(name))),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(_render_call, calls))


def _render_call(call: ToolCall) -> str:
    fields = [
        f"<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>" for name, text in split_arguments(call.arguments)
    ]
    return "\n".join([f"<tool_call>{call.name}", *fields, "</tool_call>"])
