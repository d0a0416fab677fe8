"""Parses JSON of third parties with limits on values and depth, without holding the interpreter for long.

The parser of the standard library holds the interpreter for as long as it works, in whatever thread it runs. It is
used for small texts only; the one here gives way between two values, so that it can run beside an event loop.
"""

from __future__ import annotations

import json
import re
from json import decoder
from typing import Any

MAX_VALUES = 100_000
"""Objects, lists and scalars of one text."""
MAX_DEPTH = 200
MAX_NUMBER_LENGTH = 4_300
"""As Python's own limit for integers; longer ones take quadratic time."""
SMALL_LENGTH = 65_536
"""Up to this length a text costs less than a thread."""
_STRING_PIECE = 65_536

_decode_string: Any = vars(decoder)["scanstring"]
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_STRING_PART = re.compile(r'[^"\\]*(?:\\(?:u[0-9a-fA-F]{4}|[^u])[^"\\]*)*', re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None, "NaN": float("nan"), "Infinity": float("inf")}
_CLOSING = {"{": "}", "[": "]"}


class JsonLimitError(ValueError):
    """JSON that exceeds a limit."""


class JsonDepthError(JsonLimitError):
    """JSON that is nested too deep."""


def loads_small(text: str | bytes) -> Any:
    """Parses a text of at most `SMALL_LENGTH` with the same limits; raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise JsonDepthError(f"nested deeper than {MAX_DEPTH} levels") from error
    openings = (text.count(b"["), text.count(b"{")) if isinstance(text, bytes) else (text.count("["), text.count("{"))
    if sum(openings) > MAX_DEPTH and isinstance(value, dict | list):
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise JsonDepthError(f"nested deeper than {MAX_DEPTH} levels")


def loads_large(data: str | bytes, max_values: int = MAX_VALUES) -> Any:
    """Parses a text of any length in a worker thread; raises ValueError."""
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    try:
        return _Parser(text, max_values).parse()
    except IndexError:
        raise ValueError("the text ends within a value") from None


class _Parser:
    """A parser with a stack of its own, so that its depth is a number and no call stack."""

    def __init__(self, text: str, max_values: int) -> None:
        self._text, self._left, self._max_values = text, max_values, max_values
        self._position = 0
        self._stack: list[tuple[Any, str]] = []
        """The open containers, each with the character that closes it."""
        self._key = ""

    def parse(self) -> Any:
        self._skip_space()
        root = self._read_value()
        while self._stack:
            self._step()
        self._skip_space()
        if self._position != len(self._text):
            raise ValueError(f"more text after the value, at character {self._position}")
        return root

    def _step(self) -> None:
        """Reads the end of the innermost container, or its next value."""
        container, closing = self._stack[-1]
        self._skip_space()
        char = self._text[self._position]
        if char == closing:
            self._position += 1
            self._stack.pop()
            return
        if container:
            self._expect(",")
        if closing == "]":
            container.append(self._read_value())
        else:
            key = self._read_key()
            container[key] = self._read_value()

    def _read_key(self) -> str:
        self._expect('"')
        key = self._read_string()
        self._expect(":")
        return key

    def _expect(self, char: str) -> None:
        self._skip_space()
        if self._text[self._position] != char:
            raise ValueError(f"{char!r} is missing at character {self._position}")
        self._position += 1
        self._skip_space()

    def _read_value(self) -> Any:
        """The next value; a container comes empty, on the stack."""
        self._left -= 1
        if self._left < 0:
            raise JsonLimitError(f"more than {self._max_values} values")
        char = self._text[self._position]
        if char in _CLOSING:
            if len(self._stack) >= MAX_DEPTH:
                raise JsonDepthError(f"nested deeper than {MAX_DEPTH} levels")
            container: dict[str, Any] | list[Any] = {} if char == "{" else []
            self._position += 1
            self._stack.append((container, _CLOSING[char]))
            return container
        if char == '"':
            self._position += 1
            return self._read_string()
        return self._read_scalar()

    def _read_scalar(self) -> Any:
        if (match := _NUMBER.match(self._text, self._position)) is not None:
            self._position = match.end()
            digits = match[0]
            if len(digits) > MAX_NUMBER_LENGTH:
                raise JsonLimitError(f"a number of more than {MAX_NUMBER_LENGTH} digits")
            return int(digits) if match[1] is None and match[2] is None else float(digits)
        for word, value in _CONSTANTS.items():
            if self._text.startswith(word, self._position):
                self._position += len(word)
                return value
        raise ValueError(f"no value at character {self._position}")

    def _read_string(self) -> str:
        """The string that begins here, its quote already read; long ones with escapes are read in pieces."""
        start = self._position
        end = self._text.find('"', start)
        if end < 0:
            raise ValueError("a string without an end")
        if self._text.find("\\", start, end) < 0:
            self._position = end + 1
            return self._text[start:end]
        pieces: list[str] = []
        while True:
            match = _STRING_PART.match(self._text, start, start + _STRING_PIECE)
            end = match.end() if match else start
            is_last = self._text[end] == '"'
            if end == start and not is_last:
                raise ValueError(f"an unusable escape at character {start}")
            piece, _ = _decode_string(self._text[start:end] + '"', 0, False)
            if not is_last and "\ud800" <= piece[-1] <= "\udbff" and end - start > 6:
                piece, end = piece[:-1], end - 6  # the second half of the character is in the next piece
            pieces.append(piece)
            if is_last:
                self._position = end + 1
                return "".join(pieces)
            start = end

    def _skip_space(self) -> None:
        if self._position < len(self._text) and self._text[self._position] in " \t\n\r":
            match = _SPACE.match(self._text, self._position)
            self._position = match.end() if match else self._position
