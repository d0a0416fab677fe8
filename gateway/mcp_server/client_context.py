"""The client behind a request: where its progress and log messages go, and who answers elicitation and sampling.

Older protocol versions send such requests over the client's connection; modern ones cannot (`resumable_calls.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mcp.server.connection import Connection, allowed_log_levels
from mcp.server.context import ServerRequestContext
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    LOG_LEVEL_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    LoggingLevel,
    LoggingMessageNotification,
    LoggingMessageNotificationParams,
)
from mcp_types.methods import parse_server_request
from mcp_types.version import LATEST_MODERN_VERSION, MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, ValidationError

from gateway.errors import RequestDeclined
from gateway.mcp_client.decode import META_PREFIX
from gateway.types import Context

INPUT_TIMEOUT_S = 600.0
"""How long to wait for an answer of a person or a model; a tool's own deadline usually ends the wait earlier."""
DEFAULT_LEVEL: LoggingLevel = "info"
LOG_LEVEL_STATE = "mtrl/level"
"""Key in a connection's state: the log level that its client set."""
_REQUIRED_CAPABILITY = {
    "sampling/createMessage": "sampling",
    "elicitation/create": "elicitation",
    "roots/list": "roots",
}
ANSWERING_CAPABILITIES = frozenset(_REQUIRED_CAPABILITY.values())
"""Capabilities of a client that can be asked during a call."""
_REQUEST_META_KEYS = (PROTOCOL_VERSION_META_KEY, CLIENT_INFO_META_KEY, "progressToken")

RequestContext = ServerRequestContext[Any, Any]


class _AnyResult(BaseModel):
    """A client's answer, passed on unchecked: the server that asked validates it."""

    model_config = ConfigDict(extra="allow")


def is_modern(request: RequestContext) -> bool:
    """Whether the client uses a modern protocol version (since 2026)."""
    return request.protocol_version in MODERN_PROTOCOL_VERSIONS


def get_connection(request: RequestContext) -> Connection:
    """The client's connection: private in the SDK, but only it outlives a request and knows when the client leaves."""
    return request.session._connection


def get_meta(request: RequestContext) -> Mapping[str, Any]:
    """The raw `_meta` of a request."""
    meta = (request.params or {}).get("_meta")
    return meta if isinstance(meta, Mapping) else {}


def build_context(request: RequestContext, *, is_only_client: bool = False) -> Context:
    """The context of a request; it can answer server requests if its client declared any such capability."""
    meta = _upstream_meta(request)

    async def send_log(method: str, params: Mapping[str, Any]) -> None:
        if params.get("level") in allowed_log_levels(LATEST_MODERN_VERSION, meta):
            log_params = LoggingMessageNotificationParams.model_validate(params, by_name=False)
            await request.session.send_notification(LoggingMessageNotification(params=log_params), request.request_id)

    async def ask_client(method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        require_capability(method, meta)
        return await _send_request(request, method, params)

    can_answer = not ANSWERING_CAPABILITIES.isdisjoint(meta[CLIENT_CAPABILITIES_META_KEY])
    return Context(
        on_progress=request.session.report_progress if "progressToken" in get_meta(request) else None,
        on_log=send_log if LOG_LEVEL_META_KEY in meta else None,
        answer_request=ask_client if can_answer else None,
        meta=meta,
        is_only_client=is_only_client,
    )


def _upstream_meta(request: RequestContext) -> dict[str, Any]:
    """The `_meta` to send upstream: the client's own keys and capabilities, without our keys or its identity."""
    declared = request.session.client_capabilities
    capabilities = declared.model_dump(mode="json", by_alias=True, exclude_none=True) if declared else {}
    meta = upstream_request_meta(get_meta(request), capabilities)
    if not is_modern(request):
        meta[LOG_LEVEL_META_KEY] = get_connection(request).state.get(LOG_LEVEL_STATE, DEFAULT_LEVEL)
    return meta


def upstream_request_meta(meta: Mapping[str, Any], capabilities: Mapping[str, Any]) -> dict[str, Any]:
    """The client's own keys of a request's `_meta`, and its capabilities."""
    own = {
        key: value for key, value in meta.items() if key not in _REQUEST_META_KEYS and not key.startswith(META_PREFIX)
    }
    own[CLIENT_CAPABILITIES_META_KEY] = capabilities
    return own


async def _send_request(request: RequestContext, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sends a request to the client over its own connection (protocol versions before 2026)."""
    try:
        server_request = cast(Any, parse_server_request(method, request.protocol_version, dict(params)))
        metadata = ServerMessageMetadata(related_request_id=request.request_id)
        answer = await request.session.send_request(server_request, _AnyResult, INPUT_TIMEOUT_S, metadata)
    except (MCPError, NoBackChannelError, ValidationError, KeyError) as error:
        raise RequestDeclined(f"the client did not answer {method}: {error}") from error
    return answer.model_dump(mode="json")


def require_capability(method: str, meta: Mapping[str, Any]) -> None:
    """Raises `RequestDeclined` if the client has not declared the capability that a server request needs."""
    if _REQUIRED_CAPABILITY.get(method) not in meta[CLIENT_CAPABILITIES_META_KEY]:
        raise RequestDeclined(f"the client has not declared the capability for {method}")
