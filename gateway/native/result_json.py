"""Results of tools as JSON, between the gateway and the child process of a tool."""

from __future__ import annotations

import json

from gateway.bounded_json import SMALL_LENGTH, loads
from gateway.large_json import run_beside
from gateway.types import ToolCall, ToolResult
from gateway.wire import dumps, part_to_json, result_from_json, result_to_json

MAX_VALUES = 500_000
"""JSON values in one message: parsing more would hold the interpreter for longer than 150 ms."""


def encode_result(result: ToolResult) -> bytes:
    """A call's result as JSON."""
    parts = [part_to_json(part) for part in result.parts]
    return dumps(result_to_json(ToolCall("", ""), result) | {"parts": parts})


async def decode_result(body: bytes) -> ToolResult:
    """The result; a large one is read in a thread, which holds the interpreter for no long time."""
    if len(body) <= SMALL_LENGTH:
        return result_from_json(json.loads(body))
    return await run_beside(lambda: result_from_json(loads(body, MAX_VALUES)))
