"""A frame is a message or it is noise; even a wrong answer belongs to the call that asked for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mcp_types import (
    INTERNAL_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)


def messages(frame: str | bytes) -> list[JSONRPCMessage]:
    """The messages of one frame (a batch has several); nothing where the frame is noise."""
    try:
        value = json.loads(frame)
    except (ValueError, RecursionError):
        return []
    return list(_messages(value if isinstance(value, list) else [value]))


def _messages(values: list[Any]) -> Iterator[JSONRPCMessage]:
    for value in values:
        if isinstance(value, dict) and (message := _message(value)) is not None:
            yield message


def _message(frame: dict[str, Any]) -> JSONRPCMessage | None:
    """Built without validation: a call must not fail for what nobody reads, nor pay for the check."""
    number, method, params = frame.get("id"), frame.get("method"), frame.get("params")
    known = isinstance(number, str | int) and not isinstance(number, bool)
    if isinstance(method, str):
        params = params if isinstance(params, dict) else None
        if known:
            return JSONRPCRequest.model_construct(jsonrpc="2.0", id=number, method=method, params=params)
        return JSONRPCNotification.model_construct(jsonrpc="2.0", method=method, params=params)
    if not known and (number is not None or not isinstance(frame.get("error"), dict)):
        return None
    result = frame.get("result")
    if isinstance(result, dict):
        return JSONRPCResponse.model_construct(jsonrpc="2.0", id=number, result=result)
    return failure(number, *_error(frame))


def _error(frame: dict[str, Any]) -> tuple[str, int, Any]:
    error = frame.get("error")
    if not isinstance(error, dict):
        return "the server's answer is not a JSON-RPC result", INTERNAL_ERROR, None
    code = error.get("code")
    return str(error.get("message", "")), code if isinstance(code, int) else INTERNAL_ERROR, error.get("data")


def failure(number: Any, message: str, code: int = INTERNAL_ERROR, data: Any = None) -> JSONRPCError:
    error = ErrorData.model_construct(code=code, message=message, data=data)
    return JSONRPCError.model_construct(jsonrpc="2.0", id=number, error=error)


def frame(message: JSONRPCMessage) -> bytes:
    """ASCII only, so that no lone surrogate that a policy wrote can break the pipe."""
    return json.dumps(message.model_dump(by_alias=True, exclude_unset=True)).encode("ascii")


_HEAD = re.compile(rb'^\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]{1,64}")\s*,')
_TAIL = re.compile(rb',\s*"id"\s*:\s*(\d+|"[^"\\]{1,64}")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


def addressee(head: bytes, tail: bytes) -> str | int | None:
    """Whose answer a frame is that is too large to be read: its id stands first or last."""
    found = _HEAD.match(head) or _TAIL.search(tail)
    return None if found is None else json.loads(found[1])
