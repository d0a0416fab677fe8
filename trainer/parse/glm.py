"""GLM: a call is a name and then keys and values in turn, in tags."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.types import ToolCall

from .family import Found, Marked, named, until, word_after
from .fields import arguments_of, fields_of
from .written import Malformed


class Glm(Marked):
    """A value ends with the first `</arg_value>`: the format has no way to write that word in one."""

    name = "glm"
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)

    def read(self, text: str, at: int) -> Found:
        begin = at = at + len("<tool_call>")
        end = text.find("<", begin)
        if end < 0:
            raise Malformed("</tool_call> is missing", begin)
        name = named(text[begin:end].strip(), begin)
        fields: dict[str, str] = {}
        at = end
        while True:
            word, at = word_after(text, at, "<arg_key>", "</tool_call>")
            if word == "</tool_call>":
                break
            key, after = until(text, at, "</arg_key>")
            if key in fields:
                raise Malformed(f"the argument {key[:80]!r} is given twice", at)
            fields[key], at = until(text, word_after(text, after, "<arg_value>")[1], "</arg_value>")
        return Found(at, (ToolCall("", name, arguments_of(list(fields.items()), self.schemas.get(name))),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "\n".join(map(_rendered, calls))


def _rendered(call: ToolCall) -> str:
    fields = [f"<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>" for name, text in fields_of(call.arguments)]
    return "\n".join([f"<tool_call>{call.name}", *fields, "</tool_call>"])
