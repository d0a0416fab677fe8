"""Reads and writes JSON-RPC messages: large ones are parsed off the event loop, and all within limits.

An answer that cannot be read becomes an error for the request it answers, where its id can still be found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar
from mcp_types import (
    INTERNAL_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

from gateway.bounded_json import SMALL_LENGTH, loads

EDGE_BYTES = 256
"""How much of both ends of an oversized message is kept, to find its id."""
GUESS_BYTES = 4096
MAX_BATCH = 1_000
"""Messages in one JSON array; a server that has more sends several."""
MAX_LARGE_PARSES = 2


class UnreadableMessageError(ValueError):
    """Data that was meant as a message but cannot be read; `request_id` is the request's that it answers, if known."""

    def __init__(self, problem: str, request_id: str | int | None) -> None:
        super().__init__(f"the server's answer cannot be read: {problem}")
        self.request_id = request_id


def parse_messages(data: bytes) -> list[JSONRPCMessage]:
    """The messages in `data` (several for a batch); none if it is not JSON-RPC.

    Raises `UnreadableMessageError` for JSON that is malformed or exceeds a limit.
    """
    if not data[:EDGE_BYTES].lstrip().startswith((b"{", b"[")):
        return []
    try:
        value = loads(data)
    except ValueError as error:
        raise UnreadableMessageError(_describe_problem(error), guess_request_id(data)) from error
    if isinstance(value, list) and len(value) > MAX_BATCH:
        raise UnreadableMessageError(f"a batch of more than {MAX_BATCH} messages", guess_request_id(data))
    return list(_to_messages(value if isinstance(value, list) else [value]))


_large_parses: RunVar[anyio.CapacityLimiter] = RunVar("large_parses")


async def read_messages(data: bytes) -> list[JSONRPCMessage]:
    """The same without holding the event loop.

    Few are parsed at a time: they share the interpreter with the event loop, and each takes a multiple of its bytes.
    """
    if len(data) <= SMALL_LENGTH:
        return parse_messages(data)
    limiter = _large_parses.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MAX_LARGE_PARSES)
        _large_parses.set(limiter)
    return await to_thread.run_sync(parse_messages, data, abandon_on_cancel=True, limiter=limiter)


def _describe_problem(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    return f"it is not usable JSON ({str(error).partition(';')[0]})"


_ANY_ID = re.compile(rb'"id"\s*:\s*(\d{1,18}|"[^"\\]{1,64}")\s*[,}]')


def guess_request_id(data: bytes) -> str | int | None:
    """The id of the request that unreadable data answers: its first or last field, or the only id near its ends."""
    found = find_request_id(data[:EDGE_BYTES], data[-EDGE_BYTES:])
    if found is not None:
        return found
    ids = {*_ANY_ID.findall(data[:GUESS_BYTES]), *_ANY_ID.findall(data[-GUESS_BYTES:])}
    return _decode_id(ids.pop()) if len(ids) == 1 else None


def _decode_id(data: bytes) -> str | int | None:
    try:
        request_id: str | int = json.loads(data)
    except ValueError:
        return None
    return request_id


def _to_messages(values: list[Any]) -> Iterator[JSONRPCMessage]:
    for value in values:
        if isinstance(value, dict) and (message := _to_message(value)) is not None:
            yield message


def _to_message(frame: dict[str, Any]) -> JSONRPCMessage | None:
    """Builds the message without validation: fields that nobody reads must not fail a call or cost time."""
    request_id, method, params = frame.get("id"), frame.get("method"), frame.get("params")
    has_id = isinstance(request_id, str | int) and not isinstance(request_id, bool)
    if isinstance(method, str):
        params = params if isinstance(params, dict) else None
        if has_id:
            return JSONRPCRequest.model_construct(jsonrpc="2.0", id=request_id, method=method, params=params)
        return JSONRPCNotification.model_construct(jsonrpc="2.0", method=method, params=params)
    if not has_id and (request_id is not None or not isinstance(frame.get("error"), dict)):
        return None
    result = frame.get("result")
    if isinstance(result, dict):
        return JSONRPCResponse.model_construct(jsonrpc="2.0", id=request_id, result=result)
    return error_response(request_id, *_read_error(frame))


def _read_error(frame: dict[str, Any]) -> tuple[str, int, Any]:
    error = frame.get("error")
    if not isinstance(error, dict):
        return "the server's answer is not a JSON-RPC result", INTERNAL_ERROR, None
    code = error.get("code")
    return str(error.get("message", "")), code if isinstance(code, int) else INTERNAL_ERROR, error.get("data")


def error_response(request_id: Any, message: str, code: int = INTERNAL_ERROR, data: Any = None) -> JSONRPCError:
    """A JSON-RPC error for a request."""
    error = ErrorData.model_construct(code=code, message=message, data=data)
    return JSONRPCError.model_construct(jsonrpc="2.0", id=request_id, error=error)


def serialize(message: JSONRPCMessage) -> bytes:
    """The message as ASCII JSON, so that a lone surrogate written by a policy cannot break the pipe."""
    if isinstance(message, JSONRPCRequest):  # by far the most frequent; its params are JSON already
        frame: dict[str, Any] = {"jsonrpc": "2.0", "id": message.id, "method": message.method}
        if message.params is not None:
            frame["params"] = message.params
    else:
        frame = message.model_dump(by_alias=True, exclude_unset=True)
    return json.dumps(frame).encode("ascii")


_HEAD = re.compile(rb'^\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]{1,64}")\s*,')
_TAIL = re.compile(rb',\s*"id"\s*:\s*(\d+|"[^"\\]{1,64}")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


def find_request_id(head: bytes, tail: bytes) -> str | int | None:
    """The id of the request that an oversized response answers, if it is the first or last field."""
    match = _HEAD.match(head) or _TAIL.search(tail)
    return None if match is None else _decode_id(match[1])
