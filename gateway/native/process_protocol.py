"""Messages between the gateway and the child process of a tool: JSON with its length before it."""

from __future__ import annotations

import json
from typing import Any

from gateway.bounded_json import loads
from gateway.types import ToolCall, ToolResult
from gateway.wire import dumps, part_to_json, result_from_json, result_to_json

HEADER_BYTES = 8
"""Size of the length that precedes a message."""
MAX_VALUES = 500_000
"""JSON values in one message: parsing more would hold the interpreter for longer than 150 ms."""
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""A longer message is not read."""


def encode(message: Any) -> bytes:
    """A message with its header."""
    body = dumps(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_length(header: bytes) -> int:
    """The length that a header announces. Raises ValueError if no message is that long."""
    length = int.from_bytes(header, "big")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes is too long")
    return length


def encode_result(result: ToolResult) -> bytes:
    """The message with a call's result."""
    parts = [part_to_json(part) for part in result.parts]
    return encode(result_to_json(ToolCall("", ""), result) | {"parts": parts})


def decode_result(body: bytes) -> ToolResult:
    """The result in a message's body."""
    return result_from_json(json.loads(body))


def decode_large_result(body: bytes) -> ToolResult:
    """The same for a body of any size, in a thread: holds the interpreter for no long time."""
    return result_from_json(loads(body, MAX_VALUES))
