"""A tool may return any value; said in JSON's own kinds it can be written, sent and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import BaseModel


def plain(value: Any) -> Any:
    """The same value in JSON's own kinds; what JSON has no word for becomes its text."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def to_json(value: Any) -> str:
    """JSON as a policy reads it: its own alphabet, no escapes for what is printable."""
    return json.dumps(plain(value), ensure_ascii=False)
