"""Scans JSON text: finds the ends and members of values without building them, and without recursion."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

MAX_DEPTH = 64
"""Deeper values are rejected, since later readers of the arguments recurse."""
MAX_DIGITS = 400

# Possessive quantifiers, so that no text causes backtracking.
_SPACE = re.compile(r"[ \t\n\r]*+")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+")
_WORD = re.compile("true|false|null")
_NOT_JSON = re.compile("-?(?:NaN|Infinity|True|False|None|undefined)")
_BRACKETS = {"{": "}", "[": "]"}


class MalformedCall(ValueError):
    """Text that looks like a call but is not one; `offset` is where it goes wrong."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(reason)
        self.reason, self.offset = reason, offset


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a JSON object."""

    key: str
    text: str
    """The value exactly as written."""
    offset: int


def skip_space(text: str, index: int) -> int:
    """The index of the next character that is not white space."""
    match = _SPACE.match(text, index)
    return match.end() if match else index


def find_value_end(text: str, start: int) -> int:
    """The end of the JSON value at `start`. Raises MalformedCall."""
    index, brackets = start, [""]
    while brackets:
        index = skip_space(text, index)
        opening = text[index : index + 1]
        if opening in _BRACKETS:
            if len(brackets) > MAX_DEPTH:
                raise MalformedCall(f"it is nested deeper than {MAX_DEPTH} levels", index)
            brackets.append(_BRACKETS[opening])
            index = skip_space(text, index + 1)
            if not text.startswith(brackets[-1], index):
                index = _skip_key(text, index) if opening == "{" else index
                continue
        else:
            index = _skip_scalar(text, index)
        index = _close_brackets(text, index, brackets)
    return index


def _close_brackets(text: str, index: int, brackets: list[str]) -> int:
    """From the end of a value over all closing brackets after it to the start of the next value."""
    while bracket := brackets[-1]:
        index = skip_space(text, index)
        if text.startswith(bracket, index):
            brackets.pop()
            index += 1
        elif text.startswith(",", index):
            index = skip_space(text, index + 1)
            return _skip_key(text, index) if bracket == "}" else index
        else:
            raise _missing(text, index, f"',' or '{bracket}' is missing")
    brackets.pop()
    return index


def _skip_key(text: str, index: int) -> int:
    """Skips a key and its colon."""
    if not text.startswith('"', index):
        raise _missing(text, index, "a key in double quotes is missing")
    index = skip_space(text, _skip_string(text, index))
    if not text.startswith(":", index):
        raise _missing(text, index, "':' is missing after a key")
    return index + 1


def _skip_scalar(text: str, index: int) -> int:
    if text.startswith('"', index):
        return _skip_string(text, index)
    if number := _NUMBER.match(text, index):
        if len(number[0]) > MAX_DIGITS or math.isinf(float(number[0])):
            raise MalformedCall("a number is too large", index)
        return number.end()
    if word := _WORD.match(text, index):
        return word.end()
    if other := _NOT_JSON.match(text, index):
        raise MalformedCall(f"{other[0]} is not JSON", index)
    raise _missing(text, index, "a value is missing")


def _skip_string(text: str, index: int) -> int:
    if match := _STRING.match(text, index):
        return match.end()
    raise MalformedCall("a string is not closed, or has a raw line break or a wrong escape in it", index)


def _missing(text: str, index: int, reason: str) -> MalformedCall:
    return MalformedCall("its JSON ends too early" if index >= len(text) else reason, index)


def read_members(text: str, start: int) -> tuple[list[Member], int]:
    """The members of the object at `start`, and its end."""
    if not text.startswith("{", start):
        raise MalformedCall("a JSON object is missing", start)
    members: list[Member] = []
    index = skip_space(text, start + 1)
    if text.startswith("}", index):
        return members, index + 1
    while True:
        after_colon = _skip_key(text, index)
        key = json.loads(text[index : _skip_string(text, index)])
        begin = skip_space(text, after_colon)
        end = find_value_end(text, begin)
        members.append(Member(key, text[begin:end], begin))
        index = skip_space(text, end)
        if text.startswith("}", index):
            return members, index + 1
        if not text.startswith(",", index):
            raise _missing(text, index, "',' or '}' is missing")
        index = skip_space(text, index + 1)


def find_object_end(text: str, start: int) -> int:
    """The end of the JSON object at `start`."""
    if not text.startswith("{", start):
        raise MalformedCall("a JSON object is missing", start)
    return find_value_end(text, start)


def find_items(text: str, start: int) -> tuple[list[int], int]:
    """The starts of the items of the list at `start`, and its end."""
    end = find_value_end(text, start)
    starts: list[int] = []
    index = skip_space(text, start + 1)
    while not text.startswith("]", index):
        starts.append(index)
        index = skip_space(text, find_value_end(text, index))
        index = skip_space(text, index + 1) if text.startswith(",", index) else index
    return starts, end
