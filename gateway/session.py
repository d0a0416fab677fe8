"""One rollout's hold on the gateway: its tools, its interaction, its rewards, and the end of all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeGuard

import anyio

from gateway.errors import SessionError
from gateway.table import Source, Table, Tool
from gateway.toolset import NO_SUCH_TOOL, Session, missing
from gateway.types import ALONE, Context, Feedback, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec

log = logging.getLogger(__name__)

QUIET_S = 5.0
"""For calls that are cancelled at the end to let go of what they hold."""
REWARDS_S = 60.0
"""For all last rewards; what is held is given back without them."""
RELEASE_S = 30.0
"""Everything that a session holds must be given back by then."""

CANCELLED = ToolResult((Text("The call was cancelled."),), Outcome.CANCELLED, reason="cancelled by its caller")
WITHDRAWN = ToolResult(
    (Text("The tool is not available any more."),), Outcome.UNAVAILABLE, reason="its owner no longer offers it"
)
"""The policy was shown the tool when the session opened, so that calling it is no mistake of the policy."""


class FeedbackSession(Session, Protocol):
    @property
    def name(self) -> str | None: ...

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback: ...


def hears(session: Session) -> TypeGuard[FeedbackSession]:
    return hasattr(session, "feedback")


@dataclass(frozen=True, slots=True)
class Reward:
    """A number that belongs to the rollout, and where it came from."""

    source: str
    value: float
    kind: Literal["call", "feedback", "end"]
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """What has begun and not ended."""

    name: str
    since: float
    """By `time.monotonic`."""


class AnySession(Session, Protocol):
    """What a rollout holds, in this process or across a border."""

    @property
    def id(self) -> str: ...

    @property
    def rewards(self) -> Sequence[Reward]: ...

    async def calls(self, calls: Sequence[ToolCall], context: Context = ALONE) -> list[ToolResult]: ...

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback: ...

    async def close(self) -> None: ...


class AnyGateway(Protocol):
    """What opens sessions, in this process or across a border; enter it first."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...

    @property
    def specs(self) -> Sequence[ToolSpec]: ...

    async def begin(self, task: Task) -> AnySession: ...

    def open(self, task: Task = ...) -> AbstractAsyncContextManager[AnySession]: ...


@dataclass(frozen=True, slots=True)
class Observed:
    """One call as an observer sees it, after its end."""

    session_id: str
    call: ToolCall
    spec: ToolSpec | None
    result: ToolResult


Observer = Callable[[Observed], None]


class GatewaySession:
    """Made by `Gateway.begin`, which gives it what it must give back: `stack`, and `leave` to say that it did."""

    def __init__(self, id: str, task: Task, table: Table, observers: Sequence[Observer]) -> None:
        self.id, self.task = id, task
        self.rewards: list[Reward] = []
        self.ttl_s = task.ttl_s
        self.stack = AsyncExitStack()
        self.inner: dict[int, Session] = {}
        """By the identity of the source."""
        self.heard: FeedbackSession | None = None
        self.closed = False
        self._tools = chosen(task, table)
        self._observers = observers
        self.called = 0
        """Calls that have ended."""
        self._scopes: dict[anyio.CancelScope, Running] = {}
        self._finished: dict[str, float] | None = None
        self._done_closing: anyio.Event | None = None
        self._left = anyio.Event()
        self._began = self._used = time.monotonic()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """What the policy may call; fixed when the session opened, as the policy's prompt is."""
        return [tool.spec for tool in self._tools.values() if tool.spec.audience == "policy"]

    @property
    def remaining_s(self) -> float | None:
        """Until it expires; every use begins the time anew, and while one lasts the time stands still."""
        if self.ttl_s is None or self._scopes:
            return self.ttl_s
        return max(0.0, self._used + self.ttl_s - time.monotonic())

    @property
    def running(self) -> list[Running]:
        """The oldest first."""
        return list(self._scopes.values())

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def sources(self) -> list[Source]:
        """The sources that this session needs, in the gateway's order."""
        return list(dict.fromkeys(tool.source for tool in self._tools.values()))

    def asks_of(self, source: Source) -> Task:
        """The task in the names that a source knows."""
        mine = {name: tool for name, tool in self._tools.items() if tool.source is source}
        tools = tuple(tool.inner for tool in mine.values())
        create = {mine[name].inner: kwargs for name, kwargs in self.task.create.items() if name in mine}
        return replace(self.task, tools=tools, create=create)

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        """Never raises for what a tool did; every ending is an outcome."""
        self._use()
        began = time.perf_counter()
        tool = self._tools.get(call.name)
        if tool is not None and tool.spec.audience == "loop" and context.audience != "loop":
            tool = None
        result = CANCELLED
        try:
            result = missing(call.name, self.specs) if tool is None else await self._checked(tool, call, context)
        finally:
            result = replace(result, elapsed_s=time.perf_counter() - began)
            self._note(call, tool, result)
        return result

    def _note(self, call: ToolCall, tool: Tool | None, result: ToolResult) -> None:
        self.called += 1
        if result.reward is not None:
            kind: Literal["call", "feedback"] = "feedback" if tool and tool.spec.audience == "loop" else "call"
            self.rewards.append(Reward(call.name, result.reward, kind, call.id))
        if self._observers:
            seen = Observed(self.id, call, tool.spec if tool else None, result)
            for observe in self._observers:
                observe(seen)

    async def calls(self, calls: Sequence[ToolCall], context: Context = ALONE) -> list[ToolResult]:
        """All calls of one message at once; the answers keep the order of the calls."""
        if len(calls) == 1:
            return [await self.call(calls[0], context)]
        results: list[ToolResult | None] = [None] * len(calls)

        async def one(place: int) -> None:
            results[place] = await self.call(calls[place], context)

        async with anyio.create_task_group() as tasks:
            for place in range(len(calls)):
                tasks.start_soon(one, place)
        return [result for result in results if result is not None]

    async def _checked(self, tool: Tool, call: ToolCall, context: Context) -> ToolResult:
        mistake = tool.checker.mistake(call.arguments)
        if mistake is not None:
            return ToolResult((Text(mistake),), Outcome.INVALID, reason="arguments do not fit the schema")
        inner = self.inner[id(tool.source)]
        with anyio.CancelScope() as scope:
            self._scopes[scope] = Running(call.name, time.monotonic())
            try:
                named = call if tool.inner == call.name else replace(call, name=tool.inner)
                result = await inner.call(named, context)
                if result.reason == NO_SUCH_TOOL:
                    return WITHDRAWN
                return result if tool.source.admit is None else await tool.source.admit(result)
            except Exception as error:  # boundary: a source that raises broke its own promise, not the rollout's
                log.exception("source of %r failed", call.name)
                text = "The tool failed in an unforeseen way."
                return ToolResult((Text(text),), Outcome.UNKNOWN, reason=f"{type(error).__name__}: {error}")
            finally:
                self._leave(scope)
        return CANCELLED

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        """One turn of the session's interaction."""
        self._use()
        if self.heard is None:
            raise SessionError("this gateway has no feedback interaction; add one under `interaction:` in a YAML file")
        with anyio.CancelScope() as scope:
            self._scopes[scope] = Running(self.heard.name or "feedback", time.monotonic())
            try:
                heard = await self.heard.feedback(messages)
            finally:
                self._leave(scope)
            if not heard.outcome.infrastructure:
                self.rewards.append(Reward(self.heard.name or "feedback", heard.score, "feedback"))
            return heard
        return Feedback(outcome=Outcome.CANCELLED, reason="session closed")

    async def finish(self) -> Mapping[str, float]:
        """The rewards that tools give at the end; asked once, however often this is called."""
        if self._finished is None:
            self._finished = {}
            for source in self.sources:
                names = {tool.inner: name for name, tool in self._tools.items() if tool.source is source}
                for inner, value in (await self.inner[id(source)].finish()).items():
                    name = names.get(inner, inner)
                    self._finished[name] = value
                    self.rewards.append(Reward(name, value, "end"))
        return self._finished

    async def close(self) -> None:
        """Ends what runs, asks for last rewards, gives everything back; safe to call again, and from any task."""
        if self._done_closing is not None:
            await self._done_closing.wait()
            return
        self._done_closing = anyio.Event()
        self.closed = True
        for scope in list(self._scopes):
            scope.cancel()
        if self._scopes:
            await self._last("its calls did not end", QUIET_S, self._quiet)
        await self._last("no last rewards", REWARDS_S, self.finish)
        await self._last("not everything was given back", RELEASE_S, self.stack.aclose)
        self._done_closing.set()

    async def _last(self, otherwise: str, within_s: float, act: Callable[[], Awaitable[object]]) -> None:
        """One step of closing: however it ends, the next one follows."""
        with anyio.move_on_after(within_s, shield=True) as scope:
            try:
                await act()
            except Exception:  # boundary: a reward that cannot be had must not keep anything from its release
                log.exception("a session of task %r: %s", self.task.id, otherwise)
        if scope.cancelled_caught:
            log.error("a session of task %r: %s within %s s", self.task.id, otherwise, within_s)

    async def _quiet(self) -> None:
        """A last reward counts all that was done, so nothing may still be doing it."""
        while self._scopes:
            self._left = anyio.Event()
            await self._left.wait()

    def _leave(self, scope: anyio.CancelScope) -> None:
        self._scopes.pop(scope, None)
        self._used = time.monotonic()
        self._left.set()

    def _use(self) -> None:
        if self.closed:
            raise SessionError("the session is closed")
        self._used = time.monotonic()


def chosen(task: Task, table: Table) -> Mapping[str, Tool]:
    """The tools of a session. A name that nobody offers is a mistake in the data, and is not passed over."""
    unknown = [name for name in (*(task.tools or ()), *task.create) if name not in table.tools]
    if unknown:
        offered = ", ".join(sorted(table.tools)) or "none"
        raise SessionError(f"no tool named {', '.join(map(repr, unknown))}; offered are: {offered}")
    if task.tools is None:
        return table.tools
    wanted = set(task.tools)
    return {name: tool for name, tool in table.tools.items() if name in wanted or tool.spec.audience == "loop"}
