"""A client's state is its own: it lasts as long as the client stays, and no other client ever sees it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from gateway.gateway import Gateway
from gateway.session import GatewaySession
from gateway.types import Task


class Visit:
    """What one client has opened. A source is opened when the client first calls a tool of it.

    So a client that uses one tool does not start every server, nor fail for one that is down.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._by_tool: dict[str, GatewaySession] = {}
        self._turns: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def session(self, name: str) -> GatewaySession:
        """The session in which this tool is called; `name` must be one that the gateway offers, or that is open."""
        session = self._by_tool.get(name)
        if session is not None and not session.closed:
            return session
        source = self._gateway.table.tools[name].source
        async with self._turns[source.key]:
            session = self._by_tool.get(name)
            if session is None or session.closed:
                session = await self._begin(name)
            return session

    async def _begin(self, name: str) -> GatewaySession:
        """A tool that came later than its neighbours gets a session of its own; theirs keep their state."""
        table = self._gateway.table
        offered = [n for n, tool in table.of(table.tools[name].source).items() if tool.spec.audience == "policy"]
        closed = [n for n in offered if n not in self._by_tool or self._by_tool[n].closed]
        session = await self._gateway.begin(Task(tools=tuple(closed)))
        self._by_tool.update(dict.fromkeys(closed, session))
        return session

    def offers(self, name: str) -> bool:
        """A tool that is no longer listed stays callable for whoever has it open."""
        session = self._by_tool.get(name)
        if session is not None and not session.closed:
            return True
        return offered(self._gateway, name)

    async def close(self) -> None:
        sessions = {id(session): session for session in self._by_tool.values()}
        async with anyio.create_task_group() as closing:
            for session in sessions.values():
                closing.start_soon(session.close)


def offered(gateway: Gateway, name: str) -> bool:
    tool = gateway.table.tools.get(name)
    return tool is not None and tool.spec.audience == "policy"


@asynccontextmanager
async def passing(gateway: Gateway, name: str) -> AsyncIterator[GatewaySession]:
    """For a call that comes from nowhere and leads nowhere: a session of its own, so that strangers share nothing."""
    async with gateway.open(Task(tools=(name,))) as session:
        yield session
