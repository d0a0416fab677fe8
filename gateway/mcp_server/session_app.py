"""Sessions that are open already as MCP servers: each request is served by the session that it arrives with."""

from __future__ import annotations

import json
import secrets
from contextlib import AbstractAsyncContextManager
from typing import Any

import mcp_types as mcp
from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import GatewayError
from gateway.mcp_server.client_context import RequestContext, build_context, is_modern
from gateway.mcp_server.encode import to_tool
from gateway.mcp_server.server import build_page, encode_result
from gateway.mcp_server.transports import MAX_BODY_BYTES, HeaderStripper
from gateway.session import AnySession
from gateway.types import ToolCall
from gateway.version import installed_version

_SESSION = "mtrl.session"
"""The key in an ASGI scope under which the session travels."""


class SessionMcpApp:
    """Streamable HTTP for many sessions. Nothing is kept between requests, so that no client sees another's session."""

    def __init__(self) -> None:
        server = Server[Any]("mtrl-tools", version=installed_version())
        server.add_request_handler("tools/list", mcp.PaginatedRequestParams, _list_tools)
        server.add_request_handler("tools/call", mcp.CallToolRequestParams, _call_tool)
        self._manager = StreamableHTTPSessionManager(
            server,
            stateless=True,
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=MAX_BODY_BYTES,
        )
        self._app: ASGIApp = HeaderStripper(StreamableHTTPASGIApp(self._manager))

    def run(self) -> AbstractAsyncContextManager[None]:
        """A context within which requests are served, once."""
        return self._manager.run()

    async def serve(self, session: AnySession, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request with a session. The caller has checked who may."""
        await self._app({**scope, _SESSION: session}, receive, send)


def _get_session(request: RequestContext) -> AnySession:
    http_request: Any = request.request
    session: AnySession = http_request.scope[_SESSION]
    return session


async def _list_tools(request: RequestContext, params: mcp.PaginatedRequestParams) -> dict[str, Any]:
    specs = [spec for spec in _get_session(request).specs if spec.audience == "policy"]
    tools = [to_tool(spec, modern=is_modern(request)) for spec in specs]
    return build_page("tools/list", request.protocol_version, "tools", tools, params.cursor)


async def _call_tool(request: RequestContext, params: mcp.CallToolRequestParams) -> dict[str, Any]:
    session = _get_session(request)
    if not any(spec.name == params.name and spec.audience == "policy" for spec in session.specs):
        raise MCPError(INVALID_PARAMS, f"Unknown tool: {params.name}")
    call = ToolCall(f"mcp_{secrets.token_hex(6)}", params.name, json.dumps(params.arguments or {}))
    try:
        result = await session.call(call, build_context(request))
    except GatewayError as error:
        raise MCPError(INTERNAL_ERROR, str(error)) from error
    return encode_result(result, modern=is_modern(request))
