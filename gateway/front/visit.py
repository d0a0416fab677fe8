"""A client's state is its own: it lasts as long as the client stays, and no other client ever sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio

from gateway.errors import SessionError
from gateway.gateway import Gateway
from gateway.session import GatewaySession
from gateway.types import Task, ToolSpec


class Offer:
    """What a policy may call now, by name."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._seen: Sequence[ToolSpec] = ()
        self._by_name: Mapping[str, ToolSpec] = {}

    @property
    def tools(self) -> Mapping[str, ToolSpec]:
        """A gateway keeps the same object until its list changes."""
        specs = self._gateway.specs
        if specs is not self._seen:
            self._seen, self._by_name = specs, {spec.name: spec for spec in specs if spec.audience == "policy"}
        return self._by_name


class Visit:
    """What one client has open: one session for all tools, begun when it first calls one."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._by_tool: dict[str, GatewaySession] = {}
        self._turn = anyio.Lock()
        self._apart = False

    async def session(self, name: str) -> GatewaySession:
        async with self._turn:
            if not self.holds(name):
                await self._begin(name)
            return self._by_tool[name]

    def holds(self, name: str) -> bool:
        """A tool that is no longer listed stays callable for whoever has it open."""
        session = self._by_tool.get(name)
        return session is not None and not session.closed

    async def _begin(self, name: str) -> None:
        """A tool that came later has a session of its own, so that the others keep their state.

        So has every tool where not all can be opened together: a class may want arguments that no MCP client gives.
        """
        if not self._apart and not any(not session.closed for session in self._by_tool.values()):
            try:
                session = await self._gateway.begin(Task())
            except SessionError:
                self._apart = True
            else:
                self._by_tool.update({spec.name: session for spec in session.specs})
        if not self.holds(name):
            self._by_tool[name] = await self._gateway.begin(Task(tools=(name,)))

    async def close(self) -> None:
        sessions = {id(session): session for session in self._by_tool.values()}
        async with anyio.create_task_group() as closing:
            for session in sessions.values():
                closing.start_soon(session.close)
