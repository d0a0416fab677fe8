"""What was said and called in a rollout, of its line as it stands; no word of the format is one of its words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

BYTES = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")
"""How a medium begins that stands within a text: its letters say nothing."""
UNSAID = frozenset({"role", "type", "id", "tool_call_id"})
"""Of a message, what places it among the others."""


def said(told: Mapping[str, Any]) -> Iterator[str]:
    """Raises ValueError, KeyError, TypeError or AttributeError for what is no rollout."""
    for ledger in (*told.get("earlier", ()), told):
        for entry in ledger.get("entries", ()):
            yield from _texts(entry.get("messages", ()))
            for _, name, arguments in entry.get("calls", ()):
                yield from (name, arguments)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str) and not BYTES.match(value):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from () if name in UNSAID else _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
