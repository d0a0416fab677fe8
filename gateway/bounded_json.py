"""Parses JSON of third parties with limits on values and depth.

A parser holds the interpreter while it works, in whatever thread it runs. Within the limits that is at most 60 ms for
24 MB (10 ms for 100,000 values); the standard library's takes twice that, and 500 ms for five million times `{},`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

MAX_VALUES = 100_000
"""Objects, lists and scalars of one text."""
MAX_DEPTH = 200
"""As in the parser."""
SMALL_LENGTH = 65_536
"""Longer texts are parsed in a worker thread."""
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class JsonLimitError(ValueError):
    """JSON that exceeds a limit."""


class JsonValuesError(JsonLimitError):
    """JSON with too many values."""


class JsonDepthError(JsonLimitError):
    """JSON that is nested too deep."""


def loads(data: str | bytes, max_values: int = MAX_VALUES) -> Any:
    """Parses a text of third parties; raises ValueError."""
    text = data.decode() if isinstance(data, bytes) else data
    # Every value but the first follows a comma or an opening bracket; those within strings are told apart if need be.
    if count_marks(text) >= max_values and _has_more_values(text, max_values):
        raise JsonValuesError(f"more than {max_values} values")
    try:
        return from_json(text)
    except ValueError:  # It is bad, or has half a character (`\\ud83d`), which only the standard library reads.
        pass
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise JsonDepthError(f"nested deeper than {MAX_DEPTH} levels") from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def count_marks(text: str) -> int:
    """About the number of values in a text, those within strings included."""
    return text.count(",") + text.count("[") + text.count("{")


def _has_more_values(text: str, max_values: int) -> bool:
    count, strings, end = 1, 0, 0
    for strings, string in enumerate(_STRING.finditer(text)):
        count += count_marks(text[end : string.start()])
        end = string.end()
        if count > max_values or strings > 2 * max_values:  # no more than a key and a value for each mark
            return True
    return count + count_marks(text[end:]) > max_values


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise JsonDepthError(f"nested deeper than {MAX_DEPTH} levels")
