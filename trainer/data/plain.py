"""A row is plain: whatever a library wrapped its values in, they are what JSON has, and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from gateway.media.picture import Picture, decoded

Row = Mapping[str, Any]
PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
DIGITS = 16
"""Of an id made from a row: 64 bits, so that a million rows do not share one."""


def plain(value: Any, *, sparse: bool = False) -> Any:
    """`sparse` leaves out what is null: a table gives every row the keys of all rows, and fills them with nulls."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, sparse=sparse) for key, item in value.items() if not (sparse and item is None)}
    if isinstance(value, list | tuple):
        return [plain(item, sparse=sparse) for item in value]
    for unwrap in ("tolist", "as_py"):  # numpy's scalars and arrays, and Arrow's
        if hasattr(value, unwrap):
            return plain(getattr(value, unwrap)(), sparse=sparse)
    return value


def row_id(row: Row) -> str:
    """The same row has the same id in every format. Raises UnicodeError for a text that no file can hold,
    and MediaError for a picture that cannot be read."""
    text = json.dumps(plain(row, sparse=True), sort_keys=True, ensure_ascii=False, default=_said)
    return sha256(text.encode()).hexdigest()[:DIGITS]


def _said(value: Any) -> str:
    """A picture's name would tell where it lies in memory, and not what it shows."""
    value = decoded(value) if isinstance(value, Picture) else value
    held = value.tobytes() if hasattr(value, "tobytes") else value
    return sha256(held).hexdigest() if isinstance(held, bytes) else str(value)
