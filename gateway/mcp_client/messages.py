"""Reads and writes JSON-RPC messages: large ones are parsed off the event loop, and all within limits.

An answer that cannot be read becomes an error for the request it answers, where its id can still be found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

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
from pydantic import ValidationError

from gateway.bounded_json import MAX_VALUES, SMALL_LENGTH, JsonValuesError, count_marks, loads
from gateway.large_json import Threads, run_beside
from gateway.plural import format_count
from gateway.wire import dumps

EDGE_BYTES = 256
"""How much of both ends of an oversized message is kept, to find its id."""
GUESS_BYTES = 4096
MAX_BATCH = 1_000
"""Messages in one JSON array; a server that has more sends several."""
MAX_ERROR_CHARS = 16_384
"""What is kept of the text of a JSON-RPC error."""
_SHOWN_CHARS = 80
_BOM = b"\xef\xbb\xbf"


class UnreadableMessageError(ValueError):
    """Data that was meant as a message but cannot be read; `request_id` is the request's that it answers, if known."""

    def __init__(self, problem: str, request_id: str | int | None) -> None:
        super().__init__(f"the server's answer cannot be read: {problem}")
        self.request_id = request_id


def parse_messages(data: bytes, max_values: int = MAX_VALUES) -> list[JSONRPCMessage]:
    """The messages in `data` (several for a batch); none if it is not JSON-RPC.

    Raises `UnreadableMessageError` for JSON that is malformed or exceeds a limit.
    """
    data = data.removeprefix(_BOM)
    if not data[:EDGE_BYTES].lstrip().startswith((b"{", b"[")):
        return []
    try:
        value = loads(data, max_values)
    except JsonValuesError as error:
        if (listing := _read_long_listing(data, max_values)) is not None:
            return [listing]
        raise UnreadableMessageError(f"{error} (`result_values`)", guess_request_id(data)) from error
    except ValueError as error:
        raise UnreadableMessageError(_describe_problem(error), guess_request_id(data)) from error
    if isinstance(value, list) and len(value) > MAX_BATCH:
        raise UnreadableMessageError(f"a batch of more than {MAX_BATCH} messages", guess_request_id(data))
    return list(_to_messages(value if isinstance(value, list) else [value]))


_large_parses: Threads = RunVar("large_parses")


async def read_messages(data: bytes, max_values: int = MAX_VALUES) -> list[JSONRPCMessage]:
    """The same without holding the event loop."""
    if len(data) <= SMALL_LENGTH:
        return parse_messages(data, max_values)
    return await run_beside(parse_messages, data, max_values, threads=_large_parses)


_TOOLS = re.compile(rb'(?<!\\)"tools"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
CUT_KEY = "mtrl/cut"
"""Key in the `_meta` of a listing's page of which only the beginning was read: why."""


def _read_long_listing(data: bytes, max_values: int) -> JSONRPCMessage | None:
    """The first tools of a page with more values than are read at once; None if it is not such a page."""
    request_id, start = guess_request_id(data), _TOOLS.search(data, 0, GUESS_BYTES)
    if request_id is None or start is None:
        return None
    text, decoder = data[start.end() :].decode(), json.JSONDecoder()
    tools, count, at = list[Any](), 0, 0
    try:
        while count < max_values:
            begin, (tool, at) = at, decoder.raw_decode(text, _BETWEEN.match(text, at).end())  # type: ignore[union-attr]
            count += 1 + count_marks(text[begin:at])
            tools.append(tool)
    except (ValueError, RecursionError):
        pass
    first = format_count(len(tools), "tool")
    cut = f"a page has more than {max_values} values (`result_values`): only its first {first} can be read"
    result = {"tools": tools, "_meta": {CUT_KEY: cut}}
    return JSONRPCResponse.model_construct(jsonrpc="2.0", id=request_id, result=result)


_PIECE_OF_JSON = re.compile(rb'[{}\[\]],?$|"(?:jsonrpc|id|method|params|result|error)"\s*:')


def find_mistake(data: bytes) -> str | None:
    """What is wrong with output that was meant as messages; None if it is nothing of the kind, such as a log."""
    head = data[:EDGE_BYTES].strip()
    if b"\0" in head:
        return "it is UTF-16 or UTF-32, where MCP is UTF-8"
    if head[:15].lower() == b"content-length:":
        return "it has Content-Length headers, as the Language Server Protocol has; MCP has one message on each line"
    if head.startswith(b"\x1f\x8b"):
        return "it is compressed (gzip)"
    if _PIECE_OF_JSON.match(head):
        return "its JSON is spread over several lines; MCP has one message on each line"
    return None


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
    if isinstance(request_id, float) and request_id.is_integer():
        request_id = int(request_id)  # JSON knows one kind of number
    has_id = isinstance(request_id, str | int) and not isinstance(request_id, bool)
    if isinstance(method, str):
        params = params if isinstance(params, dict) else None
        if has_id:
            return JSONRPCRequest.model_construct(jsonrpc="2.0", id=request_id, method=method, params=params)
        return JSONRPCNotification.model_construct(jsonrpc="2.0", method=method, params=params)
    if not has_id:
        error = frame.get("error")
        if request_id is None and isinstance(error, dict):
            return error_response(None, *_read_error(frame))
        if not isinstance(error, dict) and "result" not in frame:
            return None
        shown = "none" if request_id is None else json.dumps(request_id)[:_SHOWN_CHARS]
        error_text = f"; its error says: {_read_error(frame)[0]}" if isinstance(error, dict) else ""
        return error_response(None, f"the answer's id is {shown}, which no request has{error_text}")
    result = frame.get("result")
    if isinstance(result, dict):
        return build_message(JSONRPCResponse, id=request_id, result=result)
    return error_response(request_id, *_read_error(frame))


M = TypeVar("M", JSONRPCRequest, JSONRPCResponse)


def build_message(kind: type[M], **fields: Any) -> M:
    """A message of valid fields: pydantic validates them in half the time in which `model_construct` copies them."""
    try:
        return kind(jsonrpc="2.0", **fields)
    except ValidationError:  # half a character in a key, which is no reason to refuse it
        return kind.model_construct(jsonrpc="2.0", **fields)


def _read_error(frame: dict[str, Any]) -> tuple[str, int, Any]:
    error = frame.get("error")
    if not isinstance(error, dict):
        return "the server's answer is not a JSON-RPC result", INTERNAL_ERROR, None
    code = error.get("code")
    message = str(error.get("message", ""))
    if len(message) > MAX_ERROR_CHARS:
        message = f"{message[:MAX_ERROR_CHARS]}... ({len(message)} characters)"
    return message, code if isinstance(code, int) else INTERNAL_ERROR, error.get("data")


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
    return dumps(frame)


_HEAD = re.compile(rb'^\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+|"[^"\\]{1,64}")\s*,')
_TAIL = re.compile(rb',\s*"id"\s*:\s*(\d+|"[^"\\]{1,64}")\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


def find_request_id(head: bytes, tail: bytes) -> str | int | None:
    """The id of the request that an oversized response answers, if it is the first or last field."""
    match = _HEAD.match(head) or _TAIL.search(tail)
    return None if match is None else _decode_id(match[1])
