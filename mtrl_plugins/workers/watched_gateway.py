"""Notices the first tool call of a rollout that must not be made twice, before it is made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from gateway.session import AnyGateway, AnySession
from gateway.types import DEFAULT_CONTEXT, Context, Task, ToolCall, ToolResult

OnAct = Callable[[], Awaitable[None]]


class WatchedGateway:
    """A gateway for one rollout: awaits `on_act` before the first call of a tool that is not declared repeatable."""

    def __init__(self, gateway: AnyGateway, on_act: OnAct) -> None:
        self._gateway, self._on_act = gateway, on_act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gateway, name)

    @asynccontextmanager
    async def open(self, task: Task = Task()) -> AsyncIterator[AnySession]:  # noqa: B008 - frozen
        async with self._gateway.open(task) as session:
            yield cast(AnySession, _WatchedSession(session, self._on_act))


class _WatchedSession:
    def __init__(self, session: AnySession, on_act: OnAct) -> None:
        self._session, self._on_act = session, on_act
        self._repeatable = frozenset(spec.name for spec in session.specs if spec.hints.repeatable)
        self._has_acted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        await self._watch((call,))
        return await self._session.call(call, context)

    async def calls(self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT) -> list[ToolResult]:
        await self._watch(calls)
        return await self._session.calls(calls, context)

    async def _watch(self, calls: Sequence[ToolCall]) -> None:
        if not self._has_acted and any(call.name not in self._repeatable for call in calls):
            await self._on_act()
            self._has_acted = True
