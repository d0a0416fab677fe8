"""Tool calls over HTTP that need one answer and no stream, in the modern protocol versions.

The SDK serves each request with two tasks, a stream, and several validations of what is known to be valid; for the
most frequent request that costs several times the call: 820 us of processor time in place of 445 (with 64 callers, 920
in place of 445). Here the same handler runs in the request's own task. Whatever is not such a call, or is not well
formed, goes to the SDK, whose refusals therefore hold for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import anyio
from mcp.server.runner import modern_error_data
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
)
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    LOG_LEVEL_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    SERVER_INFO_META_KEY,
    ClientCapabilities,
)
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from pydantic_core import from_json, to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.bounded_json import SMALL_LENGTH
from gateway.http.endpoint import DisconnectWatcher
from gateway.http.exchange import ClientDisconnected, Response
from gateway.large_json import run_beside
from gateway.limits import CallScope
from gateway.mcp_server.call_tasks import has_tasks
from gateway.mcp_server.client_context import ANSWERING_CAPABILITIES, upstream_request_meta
from gateway.mcp_server.connected_clients import replay
from gateway.mcp_server.server import GatewayMcpServer, encode_result
from gateway.types import Context, ToolCall, ToolResult, are_text
from gateway.wire import dumps, dumps_large, is_large_answer

PING_S = 15.0
"""Interval of comments in the answer to a long call, so that no proxy closes the connection."""
_VERSIONS = {version.encode(): version for version in MODERN_PROTOCOL_VERSIONS}
_METHOD, _VERSION = MCP_METHOD_HEADER.encode(), MCP_PROTOCOL_VERSION_HEADER.encode()
_NAME = MCP_NAME_HEADER.encode()
_REQUEST_KEYS = {"jsonrpc", "id", "method", "params"}
_PARAM_KEYS = {"name", "arguments", "_meta"}
_STREAM_META_KEYS = {"progressToken", LOG_LEVEL_META_KEY, "traceparent"}
"""Keys of `_meta` that ask for more than an answer."""
_EVENT_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class PlainCall(NamedTuple):
    """A call that was read from a request."""

    id: str | int
    version: str
    call: ToolCall
    meta: Mapping[str, Any]
    """The request's `_meta`."""
    capabilities: Mapping[str, Any]


class PlainCalls:
    """The ASGI application in front of the SDK's; `disconnects.run` must be running as a task."""

    def __init__(self, server: GatewayMcpServer, sdk_app: ASGIApp) -> None:
        self._server, self._sdk_app = server, sdk_app
        self._server_info = server.server_info_stamp
        self.disconnects = DisconnectWatcher()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not _may_be_plain(scope, headers):
            return await self._sdk_app(scope, receive, send)
        message = await receive()
        plain = None
        if message["type"] == "http.request" and not message.get("more_body"):
            plain = self._read_call(headers, message.get("body", b""))
        if plain is None:
            return await self._sdk_app(scope, replay([message], receive), send)
        answer, call_scope = _Answer(receive, send), CallScope()
        try:
            work = partial(self._run, plain, call_scope)
            body, status = await self.disconnects.cancel_on_disconnect(answer.receive, call_scope.cancel, work)
        except ClientDisconnected:
            return
        await answer.finish(scope, body, status)

    def _read_call(self, headers: Mapping[bytes, bytes], body: bytes) -> PlainCall | None:
        """The call of an offered tool in a request; None if it is anything else, or if its head says something else."""
        if len(body) > SMALL_LENGTH:
            return None
        try:
            request = from_json(body, allow_inf_nan=False)
        except ValueError:
            return None
        if not isinstance(request, dict) or request.keys() != _REQUEST_KEYS or type(request["id"]) not in (str, int):
            return None
        params = request["params"]
        if request["jsonrpc"] != "2.0" or request["method"] != "tools/call" or not isinstance(params, dict):
            return None
        name, meta, arguments = params.get("name"), params.get("_meta"), params.get("arguments", {})
        if not isinstance(meta, dict) or not isinstance(arguments, dict) or not params.keys() <= _PARAM_KEYS:
            return None
        version = _VERSIONS[headers[_VERSION]]
        if meta.get(PROTOCOL_VERSION_META_KEY) != version or headers.get(_NAME, b"").decode("latin-1") != name:
            return None
        if not _STREAM_META_KEYS.isdisjoint(meta) or name not in self._server.state.tools.without_header_arguments:
            return None
        capabilities = _read_capabilities(meta.get(CLIENT_CAPABILITIES_META_KEY))
        if capabilities is None:
            return None
        # A number that overflows (1e999) becomes Infinity, which the check of the arguments refuses; not null.
        text = to_json(arguments, ensure_ascii=True, inf_nan_mode="constants").decode()
        return PlainCall(request["id"], version, ToolCall(str(request["id"]), name, text), meta, capabilities)

    async def _run(self, plain: PlainCall, scope: CallScope) -> tuple[bytes, int]:
        """The JSON-RPC answer and its HTTP status."""
        context = Context(meta=upstream_request_meta(plain.meta, plain.capabilities))
        try:
            result = await self._server.state.call_tool(plain.call, context, plain.meta, None, scope)
            if is_large_answer(result):
                return await run_beside(self._encode, plain, result, dumps_large), 200
            return self._encode(plain, result, dumps), 200
        except Exception as error:  # boundary: what a handler raises is an answer
            data = modern_error_data(error)
            fields = data.model_dump(mode="json", by_alias=True, exclude_none=True)
            body = dumps({"jsonrpc": "2.0", "id": plain.id, "error": fields})
            return body, ERROR_CODE_HTTP_STATUS.get(data.code, 200)

    def _encode(self, plain: PlainCall, result: ToolResult, dump: Callable[[Any], bytes]) -> bytes:
        raw = encode_result(result, modern=True)
        if not are_text(result.parts):
            raw = serialize_server_result("tools/call", plain.version, raw)
        raw["_meta"] = {SERVER_INFO_META_KEY: self._server_info, **(raw.get("_meta") or {})}
        return dump({"jsonrpc": "2.0", "id": plain.id, "result": raw})


def _may_be_plain(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the head is that of a tool call in a modern version; a header that occurs twice is for the SDK."""
    return (
        scope["method"] == "POST"
        and headers.get(_METHOD) == b"tools/call"
        and headers.get(_VERSION) in _VERSIONS
        and len(headers) == len(scope["headers"])
        and _accepts_both(headers.get(b"accept", b""))
    )


@lru_cache(maxsize=64)
def _accepts_both(accept: bytes) -> bool:
    kinds = {kind.partition(b";")[0].strip().lower() for kind in accept.split(b",")}
    return b"*/*" in kinds or kinds >= {b"application/json", b"text/event-stream"}


def _read_capabilities(declared: Any) -> Mapping[str, Any] | None:
    """The client's capabilities; None if they are invalid, or if it can be asked during a call or poll its task."""
    if declared == {}:
        return {}
    try:
        known = ClientCapabilities.model_validate(declared, by_name=False)
    except ValidationError:
        return None
    capabilities = known.model_dump(mode="json", by_alias=True, exclude_none=True)
    if has_tasks({CLIENT_CAPABILITIES_META_KEY: capabilities}):
        return None
    return capabilities if ANSWERING_CAPABILITIES.isdisjoint(capabilities) else None


class _Answer:
    """The response to one call: JSON, or, if the call takes long, a stream with comments and the answer at its end."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_stream = False

    async def receive(self) -> Message:
        """The next message of the client, for a call that takes long; pings the client meanwhile."""
        while True:
            with anyio.move_on_after(PING_S):
                return await self._receive()
            if not self._is_stream:
                self._is_stream = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            await self._send({"type": "http.response.body", "body": b": ping\r\n\r\n", "more_body": True})

    async def finish(self, scope: Scope, body: bytes, status: int) -> None:
        if self._is_stream:
            event = b"event: message\r\ndata: " + body + b"\r\n\r\n"
            await self._send({"type": "http.response.body", "body": event})
        else:
            await Response(body, status)(scope, self._receive, self._send)
