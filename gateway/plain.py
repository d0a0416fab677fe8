"""A tool may return any value; said in JSON's own kinds it can be written, sent and read."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import BaseModel

SCALARS = (str, int, float, bool, type(None))
"""The most that structure holds; of these nothing else is asked."""


def plain(value: Any) -> Any:
    """The same value in JSON's own kinds; what JSON has no word for becomes its text."""
    if type(value) in SCALARS:
        return value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist") and is_array(value):
        return plain(value.tolist())
    if isinstance(value, str | int | float):
        return value
    held = raw(value)
    return str(value if held is None else held)


def to_json(value: Any) -> str:
    """JSON as a policy reads it: its own alphabet, no escapes for what is printable."""
    return json.dumps(plain(value), ensure_ascii=False)


def is_array(value: Any) -> bool:
    """An array or a number of numpy's, or of a kind like it, or a tensor; there is no need to know their libraries."""
    return hasattr(value, "__array_interface__") or (hasattr(value, "detach") and hasattr(value, "numpy"))


def raw(value: Any) -> bytes | None:
    """The bytes of what holds nothing else."""
    if isinstance(value, io.BytesIO):
        return value.getvalue()
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None
