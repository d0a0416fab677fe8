"""Scans calls and values in Python's notation and turns the values into JSON, without evaluating anything.

Templates mix the notations: `f(a='x', b=[1, null], c=True)`, so that words and strings of both are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable

from gateway.types import ToolCall
from trainer.parse.json_scan import MAX_DEPTH, MAX_DIGITS, MalformedCall, skip_space

# Possessive quantifiers, so that no text causes backtracking.
# The whole may not be possessive: before 3.11.4, Python then finds no end where one alternative is a quote.
_STRING = re.compile(r"""'(?:[^'\\]++|\\.|'(?!\s*+(?:[,)\]}:]|\Z)))*'|"(?:[^"\\]++|\\.)*\"""", re.DOTALL)
"""A single quote is an apostrophe unless an argument can end there: some templates do not escape it."""
_ESCAPE = re.compile(r"\\(?:([abfnrtv0'\"\\\n])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_ESCAPES = {
    **{"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"},
    **{"'": "'", '"': '"', "\\": "\\", "\n": ""},
}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+")
_WORD = re.compile(r"\w++")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CALL_START = re.compile(r"\s*+([^\s()\[\]{}=,'\"]{1,256}+)\s*+\(\s*+")
_KEY = re.compile(r"([^()\[\]{}=,:'\"]{1,256}+)=(?!=)")
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call `NAME(KEY=VALUE, ...)` at `start`, and its end. Raises MalformedCall."""
    head = _CALL_START.match(text, start)
    if head is None:
        raise MalformedCall("NAME( is missing", start)
    index = head.end()
    members: dict[str, str] = {}
    while not text.startswith(")", index):
        key = _KEY.match(text, index)
        if key is None:
            raise MalformedCall("an argument is not written as KEY=VALUE", index)
        name = key[1].strip()
        if name in members or not name:
            raise MalformedCall(f"the argument {name[:80]!r} is given twice" if name else "a KEY is missing", index)
        members[name], end = read_python_value(text, skip_space(text, key.end()))
        index = _next_item(text, end, ")")
    return ToolCall("", head[1], _join_object(members.items())), index + 1


def read_python_value(text: str, start: int, depth: int = 0) -> tuple[str, int]:
    """The value at `start` as JSON, and its end. Raises MalformedCall."""
    if depth > MAX_DEPTH:
        raise MalformedCall(f"it is nested deeper than {MAX_DEPTH} levels", start)
    opening = text[start : start + 1]
    if opening in ("[", "("):
        return _read_list(text, start, "]" if opening == "[" else ")", depth)
    if opening == "{":
        return _read_dict(text, start, depth)
    if opening in ("'", '"'):
        return _read_string(text, start)
    if number := _NUMBER.match(text, start):
        if len(number[0]) > MAX_DIGITS or math.isinf(float(number[0])):
            raise MalformedCall("a number is too large", start)
        return number[0], number.end()
    word = _WORD.match(text, start)
    if word and word[0] in _WORDS:
        return _WORDS[word[0]], word.end()
    raise MalformedCall("a value is missing" if start < len(text) else "it ends too early", start)


def _read_list(text: str, start: int, closing: str, depth: int) -> tuple[str, int]:
    """A list, or a tuple, which becomes one."""
    items: list[str] = []
    index = skip_space(text, start + 1)
    while not text.startswith(closing, index):
        item, end = read_python_value(text, index, depth + 1)
        items.append(item)
        index = _next_item(text, end, closing)
    return "[" + ", ".join(items) + "]", index + 1


def _read_dict(text: str, start: int, depth: int) -> tuple[str, int]:
    members: list[tuple[str, str]] = []
    index = skip_space(text, start + 1)
    while not text.startswith("}", index):
        if text[index : index + 1] not in ("'", '"'):
            raise MalformedCall("a key in quotes is missing", index)
        key, end = _read_string(text, index)
        end = skip_space(text, end)
        if not text.startswith(":", end):
            raise MalformedCall("':' is missing after a key", end)
        value, end = read_python_value(text, skip_space(text, end + 1), depth + 1)
        members.append((json.loads(key), value))
        index = _next_item(text, end, "}")
    return _join_object(members), index + 1


def _next_item(text: str, end: int, closing: str) -> int:
    """The start of what follows an item: the next item, or the closing bracket."""
    index = skip_space(text, end)
    if text.startswith(",", index):
        return skip_space(text, index + 1)
    if text.startswith(closing, index):
        return index
    raise MalformedCall(f"',' or '{closing}' is missing" if index < len(text) else "it ends too early", index)


def _read_string(text: str, start: int) -> tuple[str, int]:
    match = _STRING.match(text, start)
    if match is None:
        raise MalformedCall("a string is not closed", start)
    return dump_string(_ESCAPE.sub(_unescape, match[0][1:-1])), match.end()


def _unescape(match: re.Match[str]) -> str:
    """The character of an escape; what Python does not know stays as it is written."""
    if match[1]:
        return _ESCAPES[match[1]]
    code = int(match[2] or match[3] or match[4], 16)
    return chr(code) if code < 0x110000 else match[0]


def dump_string(text: str) -> str:
    """The string as JSON; two halves of a character become one, and a lone one stays an escape."""
    if not _SURROGATE.search(text):
        return json.dumps(text, ensure_ascii=False)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass") if _is_paired(text) else text
    return json.dumps(whole, ensure_ascii=bool(_SURROGATE.search(whole)))


def _is_paired(text: str) -> bool:
    try:
        text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeError:
        return False
    return True


def _join_object(members: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{dump_string(key)}: {value}" for key, value in members) + "}"


def format_call(call: ToolCall) -> str:
    """A call with its JSON arguments in Python's notation, as templates write it."""
    fields = [f"{key}={_format_value(value)}" for key, value in json.loads(call.arguments).items()]
    return f"{call.name}({', '.join(fields)})"


def _format_value(value: object) -> str:
    if isinstance(value, str):
        for raw, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
            value = value.replace(raw, escaped)
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else repr(value)
