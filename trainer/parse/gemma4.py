"""The parser of Gemma 4's calls: a name and fields in braces, with a token of its own for quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gateway.types import ToolCall
from trainer.parse.base import MarkedParser, ParsedCalls, check_name, expect_word, read_until
from trainer.parse.json_scan import MAX_DEPTH, MalformedCall, find_value_end, skip_space

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_KEY = re.compile(r'([^\s:{}\[\],"<>|](?:[^:{}\[\],"<>|]{0,255}+))?+:')
_PLAIN_KEY = re.compile(r"\w+")
_SCALAR_START = re.compile(r"[-0-9a-zA-Z\"]")


class Gemma4(MarkedParser):
    """Parses and renders Gemma 4's calls. A string ends at the next quote token, as the format cannot escape it."""

    name = "gemma4"
    openers = (_OPEN,)
    closers = (_CLOSE,)
    reasoning_tags = {"<|channel>thought": "<channel|>", "<|channel>": "<channel|>"}

    def parse_call(self, text: str, start: int) -> ParsedCalls:
        begin = expect_word(text, start + len(_OPEN), "call:")[1]
        brace = text.find("{", begin)
        if brace < 0:
            raise MalformedCall("{ is missing after the name", begin)
        name = check_name(text[begin:brace].strip(), begin)
        arguments, end = _read_object(text, brace, 0)
        return ParsedCalls(expect_word(text, end, _CLOSE)[1], (ToolCall("", name, arguments),))

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"{_OPEN}call:{call.name}{_format(json.loads(call.arguments))}{_CLOSE}" for call in calls)


def _read_value(text: str, start: int, depth: int) -> tuple[str, int]:
    """The value at `start` as JSON, and its end."""
    if depth > MAX_DEPTH:
        raise MalformedCall(f"it is nested deeper than {MAX_DEPTH} levels", start)
    if text.startswith(_QUOTE, start):
        value, end = read_until(text, start + len(_QUOTE), _QUOTE)
        return json.dumps(value, ensure_ascii=False), end
    if text.startswith("{", start):
        return _read_object(text, start, depth)
    if text.startswith("[", start):
        return _read_list(text, start, depth)
    if _SCALAR_START.match(text, start):
        end = find_value_end(text, start)
        return text[start:end], end
    raise MalformedCall("a value is missing", start)


def _read_object(text: str, start: int, depth: int) -> tuple[str, int]:
    members: dict[str, str] = {}
    index = skip_space(text, start + 1)
    while not text.startswith("}", index):
        key, end = _read_key(text, index)
        if key in members:
            raise MalformedCall(f"the argument {key[:80]!r} is given twice", index)
        members[key], end = _read_value(text, skip_space(text, end), depth + 1)
        index = _next_item(text, end, "}")
    pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items())
    return "{" + ", ".join(pairs) + "}", index + 1


def _read_list(text: str, start: int, depth: int) -> tuple[str, int]:
    items: list[str] = []
    index = skip_space(text, start + 1)
    while not text.startswith("]", index):
        item, end = _read_value(text, index, depth + 1)
        items.append(item)
        index = _next_item(text, end, "]")
    return "[" + ", ".join(items) + "]", index + 1


def _read_key(text: str, index: int) -> tuple[str, int]:
    """A key, bare or in quote tokens, and the end of its colon."""
    if text.startswith(_QUOTE, index):
        key, end = read_until(text, index + len(_QUOTE), _QUOTE)
        return key, expect_word(text, end, ":")[1]
    match = _KEY.match(text, index)
    if match is None or not match[1]:
        raise MalformedCall("a KEY: is missing", index)
    return match[1].strip(), match.end()


def _next_item(text: str, end: int, closing: str) -> int:
    word, after = expect_word(text, end, ",", closing)
    return skip_space(text, after) if word == "," else after - 1


def _format(value: object) -> str:
    """A JSON value in Gemma's notation."""
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        fields = [
            f"{key if _PLAIN_KEY.fullmatch(key) else _format(key)}:{_format(item)}" for key, item in value.items()
        ]
        return "{" + ",".join(fields) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_format, value)) + "]"
    return json.dumps(value)
