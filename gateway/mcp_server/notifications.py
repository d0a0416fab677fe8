"""Forwards change notifications from MCP servers to the gateway's MCP clients; a slow client delays no other."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.server.connection import Connection
from mcp.server.subscriptions import InMemorySubscriptionBus
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import event_from_wire

from gateway.gateway import Gateway
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_server.resources import ResourceCatalog, first_success
from gateway.types import DEFAULT_CONTEXT

log = logging.getLogger(__name__)

CLIENT_SEND_S = 5.0
UPSTREAM_SEND_S = 10.0
UPDATED = "notifications/resources/updated"
LIST_CHANGED = tuple(f"notifications/{name}/list_changed" for name in ("tools", "prompts", "resources"))


class NotificationHub:
    """Forwards notifications to connections (versions before 2026) and to subscriptions (modern versions)."""

    def __init__(self, gateway: Gateway, catalog: ResourceCatalog) -> None:
        self._gateway, self._catalog = gateway, catalog
        self.bus = InMemorySubscriptionBus()
        self._clients: dict[Connection, set[str]] = {}
        """The URIs of the resources that each client has subscribed to."""
        self._follower_counts: Counter[str] = Counter()
        self._servers: set[McpToolset] = set()
        self._joined: set[McpToolset] = set()
        """The servers that have been connected to at least once."""
        self._queued: dict[tuple[str, str], Mapping[str, Any]] = {}
        """Notifications to send, by method and URI, so that repeated changes are sent once."""
        self._wake = anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Forwards notifications during a block."""
        self._gateway.on_change.append(self._on_tools_changed)
        self._listen_to_servers()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_queued)
                yield
                tasks.cancel_scope.cancel()
        finally:
            self._gateway.on_change.remove(self._on_tools_changed)
            for server in self._servers:
                server.on_notification.remove(self._on_notification)

    def add_client(self, client: Connection) -> None:
        if client not in self._clients:
            self._clients[client] = set()
            client.exit_stack.push_async_callback(self._remove_client, client)

    async def _remove_client(self, client: Connection) -> None:
        for uri in self._clients.pop(client, ()):
            await self.unfollow(uri)

    async def subscribe(self, client: Connection, uri: str) -> None:
        self.add_client(client)
        if uri not in self._clients[client]:
            self._clients[client].add(uri)
            await self.follow(uri)

    async def unsubscribe(self, client: Connection, uri: str) -> None:
        if uri in self._clients.get(client, ()):
            self._clients[client].discard(uri)
            await self.unfollow(uri)

    async def follow(self, uri: str) -> None:
        """Counts one more follower of a resource; the first one subscribes upstream."""
        self._follower_counts[uri] += 1
        if self._follower_counts[uri] == 1:
            await self._send_upstream("resources/subscribe", uri)

    async def unfollow(self, uri: str) -> None:
        """Counts one follower less; the last one unsubscribes upstream."""
        self._follower_counts[uri] -= 1
        if self._follower_counts[uri] == 0:
            del self._follower_counts[uri]
            await self._send_upstream("resources/unsubscribe", uri)

    async def _send_upstream(self, method: str, uri: str) -> None:
        with anyio.move_on_after(UPSTREAM_SEND_S):
            try:
                owners = [server for server in await self._catalog.find_owners(uri) if _supports_subscriptions(server)]
                await first_success(owners, method, {"uri": uri}, DEFAULT_CONTEXT)
            except MCPError as error:
                log.warning("%s %s: %s", method, uri, error)

    def _on_tools_changed(self) -> None:
        # A reload or a server that has joined may bring other prompts and resources.
        for method in LIST_CHANGED if self._listen_to_servers() else LIST_CHANGED[:1]:
            self._enqueue(method, {})

    def _listen_to_servers(self) -> bool:
        """Listens to all current servers; whether there are new ones, or some that have joined."""
        new = set(self._catalog.servers) - self._servers
        joined = {server for server in self._catalog.servers if server.protocol_version} - self._joined
        self._joined |= joined
        for server in new:
            server.on_notification.append(self._on_notification)
        self._servers |= new
        return bool(new or joined)

    def _on_notification(self, method: str, params: Mapping[str, Any]) -> None:
        # Changed tools are announced by the gateway instead, once it has read the new listing.
        if method in (UPDATED, *LIST_CHANGED[1:]):
            self._enqueue(method, params)

    def _enqueue(self, method: str, params: Mapping[str, Any]) -> None:
        payload = {"uri": str(params.get("uri"))} if method == UPDATED else {}
        if not payload:
            self._catalog.clear_cache()
        self._queued[method, payload.get("uri", "")] = payload
        self._wake.set()

    async def _send_queued(self) -> None:
        while True:
            await self._wake.wait()
            self._wake, queued, self._queued = anyio.Event(), self._queued, {}
            for (method, uri), params in queued.items():
                event = event_from_wire(method, params)
                if event is not None:
                    await self.bus.publish(event)
                async with anyio.create_task_group() as tasks:
                    for client, followed in tuple(self._clients.items()):
                        if method != UPDATED or uri in followed:
                            tasks.start_soon(_notify_client, client, method, params or None)


async def _notify_client(client: Connection, method: str, params: Mapping[str, Any] | None) -> None:
    with anyio.move_on_after(CLIENT_SEND_S):
        await client.notify(method, params)


def _supports_subscriptions(server: McpToolset) -> bool:
    resources = server.capabilities.get("resources")
    return isinstance(resources, Mapping) and bool(resources.get("subscribe"))
