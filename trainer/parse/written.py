"""JSON as it is written: where a value ends and what its members are, without building it and without recursion."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

MAX_DEPTH = 64
"""Deeper values are refused: whoever reads the arguments later recurses."""
MAX_DIGITS = 400

# Possessive, so that no text makes them go back.
_SPACE = re.compile(r"[ \t\n\r]*+")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+")
_WORD = re.compile("true|false|null")
_NO_JSON = re.compile("-?(?:NaN|Infinity|True|False|None|undefined)")
_CLOSING = {"{": "}", "[": "]"}


class Malformed(ValueError):
    """What looked like a call and is none; `at` is where in the text it goes wrong."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.reason, self.at = reason, at


@dataclass(frozen=True, slots=True)
class Member:
    key: str
    text: str
    """The value exactly as it is written."""
    at: int


def spaced(text: str, at: int) -> int:
    """The first place from `at` on that is no white space."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def end_of(text: str, start: int) -> int:
    """Where the JSON value that begins at `start` ends; `Malformed` where there is none."""
    at, closings = start, [""]
    while closings:
        at = spaced(text, at)
        opening = text[at : at + 1]
        if opening in _CLOSING:
            if len(closings) > MAX_DEPTH:
                raise Malformed(f"it is nested deeper than {MAX_DEPTH} levels", at)
            closings.append(_CLOSING[opening])
            at = spaced(text, at + 1)
            if not text.startswith(closings[-1], at):
                at = _keyed(text, at) if opening == "{" else at
                continue
        else:
            at = _scalar(text, at)
        at = _closed(text, at, closings)
    return at


def _closed(text: str, at: int, closings: list[str]) -> int:
    """From the end of a value to the beginning of the next, over all that ends with it."""
    while closing := closings[-1]:
        at = spaced(text, at)
        if text.startswith(closing, at):
            closings.pop()
            at += 1
        elif text.startswith(",", at):
            at = spaced(text, at + 1)
            return _keyed(text, at) if closing == "}" else at
        else:
            raise _missing(text, at, f"',' or '{closing}' is missing")
    closings.pop()
    return at


def _keyed(text: str, at: int) -> int:
    """Over a key and its colon."""
    if not text.startswith('"', at):
        raise _missing(text, at, "a key in double quotes is missing")
    at = spaced(text, _string(text, at))
    if not text.startswith(":", at):
        raise _missing(text, at, "':' is missing after a key")
    return at + 1


def _scalar(text: str, at: int) -> int:
    if text.startswith('"', at):
        return _string(text, at)
    if number := _NUMBER.match(text, at):
        if len(number[0]) > MAX_DIGITS or math.isinf(float(number[0])):
            raise Malformed("a number is too large", at)
        return number.end()
    if word := _WORD.match(text, at):
        return word.end()
    if strange := _NO_JSON.match(text, at):
        raise Malformed(f"{strange[0]} is not JSON", at)
    raise _missing(text, at, "a value is missing")


def _string(text: str, at: int) -> int:
    if found := _STRING.match(text, at):
        return found.end()
    raise Malformed("a string is not closed, or has a raw line break or a wrong escape in it", at)


def _missing(text: str, at: int, reason: str) -> Malformed:
    return Malformed("its JSON ends too early" if at >= len(text) else reason, at)


def members(text: str, start: int) -> tuple[list[Member], int]:
    """The members of the object at `start`, and its end."""
    if not text.startswith("{", start):
        raise Malformed("a JSON object is missing", start)
    found: list[Member] = []
    at = spaced(text, start + 1)
    if text.startswith("}", at):
        return found, at + 1
    while True:
        colon = _keyed(text, at)
        key = json.loads(text[at : _string(text, at)])
        begin = spaced(text, colon)
        end = end_of(text, begin)
        found.append(Member(key, text[begin:end], begin))
        at = spaced(text, end)
        if text.startswith("}", at):
            return found, at + 1
        if not text.startswith(",", at):
            raise _missing(text, at, "',' or '}' is missing")
        at = spaced(text, at + 1)


def object_end(text: str, start: int) -> int:
    """Where the JSON object at `start` ends."""
    if not text.startswith("{", start):
        raise Malformed("a JSON object is missing", start)
    return end_of(text, start)


def items(text: str, start: int) -> tuple[list[int], int]:
    """Where the items of the list at `start` begin, and its end."""
    end = end_of(text, start)
    found: list[int] = []
    at = spaced(text, start + 1)
    while not text.startswith("]", at):
        found.append(at)
        at = spaced(text, end_of(text, at))
        at = spaced(text, at + 1) if text.startswith(",", at) else at
    return found, end
