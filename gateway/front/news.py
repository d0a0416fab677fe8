"""What changes upstream is told to every client that wants to know, and one that does not listen delays nobody."""

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

from gateway.front.shelf import Shelf, first_that_knows
from gateway.gateway import Gateway
from gateway.types import ALONE
from gateway.upstream.server import McpToolset

log = logging.getLogger(__name__)

TELL_S = 5.0
SAY_S = 10.0
UPDATED = "notifications/resources/updated"
LISTS = tuple(f"notifications/{name}/list_changed" for name in ("tools", "prompts", "resources"))


class News:
    """Clients until 2026 are told over their connections, later ones through what they subscribed to."""

    def __init__(self, gateway: Gateway, shelf: Shelf) -> None:
        self._gateway, self._shelf = gateway, shelf
        self.bus = InMemorySubscriptionBus()
        self._clients: dict[Connection, set[str]] = {}
        """Each with the resources that it follows."""
        self._followers: Counter[str] = Counter()
        self._heard: set[McpToolset] = set()
        self._untold: dict[tuple[str, str], Mapping[str, Any]] = {}
        """By method and resource: a change that is told late need not be told twice."""
        self._wake = anyio.Event()

    @asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Tells what happens during a block."""
        self._gateway.on_change.append(self._changed)
        self._listen()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run)
                yield
                tasks.cancel_scope.cancel()
        finally:
            self._gateway.on_change.remove(self._changed)
            for server in self._heard:
                server.on_notice.remove(self._hear)

    def join(self, client: Connection) -> None:
        if client not in self._clients:
            self._clients[client] = set()
            client.exit_stack.push_async_callback(self._leave, client)

    async def _leave(self, client: Connection) -> None:
        for uri in self._clients.pop(client, ()):
            await self.unfollow(uri)

    async def subscribe(self, client: Connection, uri: str) -> None:
        self.join(client)
        if uri not in self._clients[client]:
            self._clients[client].add(uri)
            await self.follow(uri)

    async def unsubscribe(self, client: Connection, uri: str) -> None:
        if uri in self._clients.get(client, ()):
            self._clients[client].discard(uri)
            await self.unfollow(uri)

    async def follow(self, uri: str) -> None:
        """Servers hear of the first who wants to know, and of the last who no longer does."""
        self._followers[uri] += 1
        if self._followers[uri] == 1:
            await self._say("resources/subscribe", uri)

    async def unfollow(self, uri: str) -> None:
        self._followers[uri] -= 1
        if self._followers[uri] == 0:
            del self._followers[uri]
            await self._say("resources/unsubscribe", uri)

    async def _say(self, method: str, uri: str) -> None:
        with anyio.move_on_after(SAY_S):
            try:
                owners = [server for server in await self._shelf.owners(uri) if _subscribable(server)]
                await first_that_knows(owners, method, {"uri": uri}, ALONE)
            except MCPError as error:
                log.warning("%s %s: %s", method, uri, error)

    def _changed(self) -> None:
        """After a reload there may be other servers, with other things."""
        for method in LISTS if self._listen() else LISTS[:1]:
            self._note(method, {})

    def _listen(self) -> bool:
        """Hears every server that there is now; whether there are new ones."""
        new = set(self._shelf.servers) - self._heard
        for server in new:
            server.on_notice.append(self._hear)
        self._heard |= new
        return bool(new)

    def _hear(self, method: str, params: Mapping[str, Any]) -> None:
        """A list of tools has changed when the gateway has read it, and then the gateway says so."""
        if method in (UPDATED, *LISTS[1:]):
            self._note(method, params)

    def _note(self, method: str, params: Mapping[str, Any]) -> None:
        told = {"uri": str(params.get("uri"))} if method == UPDATED else {}
        if not told:
            self._shelf.forget()
        self._untold[method, told.get("uri", "")] = told
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake, untold, self._untold = anyio.Event(), self._untold, {}
            for (method, uri), params in untold.items():
                event = event_from_wire(method, params)
                if event is not None:
                    await self.bus.publish(event)
                async with anyio.create_task_group() as telling:
                    for client, followed in tuple(self._clients.items()):
                        if method != UPDATED or uri in followed:
                            telling.start_soon(_tell, client, method, params or None)


async def _tell(client: Connection, method: str, params: Mapping[str, Any] | None) -> None:
    with anyio.move_on_after(TELL_S):
        await client.notify(method, params)


def _subscribable(server: McpToolset) -> bool:
    resources = server.capabilities.get("resources")
    return isinstance(resources, Mapping) and bool(resources.get("subscribe"))
