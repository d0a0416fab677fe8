"""MCP over streamable HTTP, both eras at one address, with room for as many clients as rollouts have."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.front.server import Front
from gateway.gateway import Gateway

IDLE_S = 4 * 3600.0
"""A rollout may think for long between two calls."""
MOST_CLIENTS = 100_000
BODY_BYTES = 8 * 1024 * 1024


def mount(gateway: Gateway, *, body_bytes: int = BODY_BYTES) -> tuple[ASGIApp, AbstractAsyncContextManager[None]]:
    """The app, and what must be entered for as long as it serves. It stands behind the guard of `gateway.http`."""
    # The guard has judged Host and Origin for every path; a second judge would know less of who may come.
    security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    clients = StreamableHTTPSessionManager(
        Front(gateway, one_client=False),
        security_settings=security,
        session_idle_timeout=IDLE_S,
        max_request_body_size=body_bytes,
        max_sessions=MOST_CLIENTS,
    )
    return _Trimmed(StreamableHTTPASGIApp(clients)), clients.run()


class _Trimmed:
    """The space around a header's value is no part of it, yet fast HTTP parsers leave it there."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        await self.app({**scope, "headers": headers}, receive, send)
