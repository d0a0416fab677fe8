"""What the requests of a server's lifetime share: its clients' visits, calls that wait for answers, and the news."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.server.subscriptions import ListenHandler
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, LoggingLevel

from gateway.errors import GatewayError
from gateway.front.behind import DEFAULT_LEVEL, Asked, behind, connection, modern, raw_meta
from gateway.front.held import Desk, Work
from gateway.front.news import News
from gateway.front.parts import OURS
from gateway.front.shelf import Shelf
from gateway.front.visit import Offer, Visit
from gateway.gateway import Gateway
from gateway.session import GatewaySession
from gateway.types import Task

HANDLE = f"{OURS}session"
"""In a request's `_meta`: the id of a session that its sender has opened, on whatever door."""
_VISIT = f"{OURS}visit"
CLOSE_S = 5.0


class Room:
    def __init__(self, gateway: Gateway, desk: Desk, visit: Visit | None) -> None:
        self.gateway, self.desk = gateway, desk
        self.visit = visit
        """Of the one client that there is, where there can be only one."""
        self.offer = Offer(gateway)
        self.shelf = Shelf(gateway)
        self.news = News(gateway, self.shelf)
        self.listen = ListenHandler(self.news.bus)
        self.level: LoggingLevel = DEFAULT_LEVEL
        """The most talkative that a client has asked for."""

    @asynccontextmanager
    async def session(self, asked: Asked, name: str) -> AsyncIterator[GatewaySession]:
        """The session that this request belongs to: named by it, its client's, or else one of its own."""
        handle, visit = raw_meta(asked).get(HANDLE), self._visit(asked)
        try:
            if handle is not None:
                yield self._named(handle, name)
            elif visit is not None:
                _must_offer(name, name in self.offer.tools or visit.holds(name))
                yield await visit.session(name)
            else:
                _must_offer(name, name in self.offer.tools)
                # A call that comes from nowhere and leads nowhere: strangers share nothing.
                async with self.gateway.open(Task(tools=(name,))) as session:
                    yield session
        except GatewayError as error:
            raise MCPError(INTERNAL_ERROR, str(error)) from error

    def _named(self, handle: Any, name: str) -> GatewaySession:
        session = self.gateway.sessions.get(handle) if isinstance(handle, str) else None
        if session is None:
            raise MCPError(INVALID_PARAMS, f"`{HANDLE}` names no open session")
        _must_offer(name, any(spec.name == name for spec in session.specs))
        return session

    def _visit(self, asked: Asked) -> Visit | None:
        if self.visit is not None or modern(asked):
            return self.visit
        client = connection(asked)
        if _VISIT not in client.state:
            client.state[_VISIT] = visit = Visit(self.gateway)
            client.exit_stack.push_async_callback(visit.close)
        found: Visit = client.state[_VISIT]
        return found

    async def converse(self, asked: Asked, work: Work) -> object:
        """Does the work with its client behind it; a client since 2026 is asked by way of the answer."""
        context, params = behind(asked), dict(asked.params or {})
        if modern(asked) and (context.ask is not None or "requestState" in params):
            return await self.desk.serve(params, context, work)
        return await work(context)


def _must_offer(name: str, there: bool) -> None:
    if not there:
        raise MCPError(INVALID_PARAMS, f"Unknown tool: {name}")


@asynccontextmanager
async def room(gateway: Gateway, *, one_client: bool) -> AsyncIterator[Room]:
    visit = Visit(gateway) if one_client else None
    try:
        async with anyio.create_task_group() as tasks:
            opened = Room(gateway, Desk(tasks), visit)
            async with opened.news.told():
                yield opened
            opened.listen.close()
            tasks.cancel_scope.cancel()
    finally:
        if visit is not None:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await visit.close()
