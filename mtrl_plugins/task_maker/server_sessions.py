"""Fresh sessions on the server that tasks are made from: calls, results as values, and the state so far."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from gateway.errors import ConfigError, GatewayError, Unavailable, unwrap_error
from gateway.large_json import is_large
from gateway.state.state_hash import has_hash_form
from gateway.types import Outcome, Task, ToolCall, ToolSpec
from mtrl_plugins.task_maker.chain import Dropped
from mtrl_plugins.task_maker.values import Value, parse_result, reports_error

T = TypeVar("T")
CALL_S = 60.0
MAX_RESULT = 100_000
"""Characters of a result, which is more than a policy reads."""
MAX_STRUCTURED = 10 * MAX_RESULT
"""Its size as values, each of which takes more than its characters."""
AT_ONCE = 8
"""Sessions that are open at the same time."""


async def run_concurrently(count: int, work: Callable[[int], Awaitable[T]]) -> list[T]:
    """The results of `work` for 0 to `count` - 1, some at the same time; the first error is raised as it is."""
    results: dict[int, T] = {}
    numbers = iter(range(count))

    async def run() -> None:
        for number in numbers:
            results[number] = await work(number)

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(min(AT_ONCE, count)):
                tasks.start_soon(run)
    except ExceptionGroup as group:
        raise unwrap_error(group) from group
    return [results[number] for number in range(count)]


@dataclass(frozen=True, slots=True)
class CallResult:
    """How a call ended."""

    ok: bool
    value: Any
    text: str
    is_large: bool = False
    """Whether the call worked, and its result is too large for a task: reading it would take most of the time."""


class ServerSession:
    """One session in a fresh state."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._calls = 0

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> CallResult:
        """Calls a tool. Raises ConfigError if the server is not there, and Dropped if an earlier call ended it."""
        self._calls += 1
        call = ToolCall(f"call_{self._calls}", tool, json.dumps(arguments))
        result = None
        with anyio.move_on_after(CALL_S):
            result = await self._session.call(call)
        if result is None:
            return CallResult(False, None, "")
        if result.outcome is Outcome.UNAVAILABLE and self._calls > 1:
            raise Dropped("a call ended the server")
        if result.outcome is Outcome.UNAVAILABLE:
            raise ConfigError(f"the server cannot be used: {result.reason}", remedy="correct its entry")
        if len(result.text) > MAX_RESULT or is_large(result.structured, MAX_STRUCTURED):
            return CallResult(False, None, "", is_large=True)
        value = parse_result(result.text, result.structured)
        return CallResult(result.outcome is Outcome.OK and not reports_error(value), value, result.text)

    async def state(self) -> Mapping[str, str]:
        """The hashes of the state as it is now; empty for a server without a folder."""
        try:
            states: Mapping[str, str] = await self._session.hash_states()
        except Unavailable as error:
            raise Dropped("the state could not be read") from error
        if any(not has_hash_form(state) for state in states.values()):
            raise Dropped("the state is too large to compare")
        return states


@dataclass(frozen=True)
class Server:
    """The server, which begins anew in each session."""

    gateway: Any
    name: str
    specs: Mapping[str, ToolSpec]
    has_folder: bool
    """Whether its state is in a folder, which can be compared."""
    states: tuple[str, ...] = ("",)
    """The names of the states that its tasks begin from."""
    files: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """The paths of the files in each of them."""
    is_prepared: bool = True
    """Whether its states have something in them."""

    @asynccontextmanager
    async def open(self, state: str) -> AsyncIterator[ServerSession]:
        """A session in a fresh state; raises ConfigError if there is none."""
        task = Task("make-tasks", tools=tuple(self.specs), state=state)
        try:
            async with self.gateway.open(task) as session:
                yield ServerSession(session)
        except GatewayError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"server {self.name!r}: {error}", remedy="correct its entry in the servers file"
            ) from error
