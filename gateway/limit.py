"""A tool has places, a pace and a deadline; what cannot be had within them ends in a word, never in a wait.

Repeated is only what was never delivered, or what its owner declared safe to repeat.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from gateway.config.models import Limits
from gateway.cut import cutter
from gateway.media.admit import Admission, Store
from gateway.toolset import Session, Toolset, Wrapped
from gateway.types import ALONE, Context, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec

FIRST_PAUSE_S = 0.05
"""Before the second attempt; it doubles with each further one."""


class Pace:
    """At most so many starts in any second; a start is booked ahead, so that callers leave in their order."""

    def __init__(self, rate_per_s: float) -> None:
        count = max(1, math.floor(rate_per_s))
        self._window_s = count / rate_per_s
        self._starts: deque[float] = deque(maxlen=count)

    async def wait(self) -> None:
        now = anyio.current_time()
        start = now
        if len(self._starts) == self._starts.maxlen:
            start = max(now, self._starts[0] + self._window_s)
        self._starts.append(start)
        if start > now:
            await anyio.sleep(start - now)


class Breaker:
    """Stops asking a server that fails every time, and lets one call try again after a while."""

    def __init__(self, failures: int = 8, pause_s: float = 5.0) -> None:
        self._most, self._pause_s = failures, pause_s
        self._failures = 0
        self._failed_at = -math.inf
        self._open_until = -math.inf

    @property
    def is_open(self) -> bool:
        return self._failures >= self._most and anyio.current_time() < self._open_until

    def admit(self) -> bool:
        """Whether a call may go through; the one that goes when the pause is over closes the door behind it."""
        if self._failures < self._most:
            return True
        now = anyio.current_time()
        if now < self._open_until:
            return False
        self._open_until = now + self._pause_s
        return True

    def record(self, outcome: Outcome, began: float = math.inf) -> None:
        """Calls that were under way together when a server died tell of one failure."""
        if not outcome.infrastructure:
            self._failures = 0
        elif outcome is not Outcome.CANCELLED and began >= self._failed_at:
            self._failed_at = anyio.current_time()
            self._failures += 1
            if self._failures >= self._most:
                self._open_until = anyio.current_time() + self._pause_s


class Gate:
    """The limits of one tool, and who is inside and before them."""

    def __init__(self, limits: Limits, store: Store) -> None:
        self.limits = limits
        self.places = anyio.Semaphore(limits.at_once, fast_acquire=True)
        self.pace = Pace(limits.rate_per_s) if limits.rate_per_s else None
        self.cut = cutter(limits.result_limit)
        self.admit = Admission(limits.media, store)
        self.waiting = 0

    async def enter(self) -> bool:
        """Takes a place, then waits for the pace; False where too many wait already."""
        try:
            self.places.acquire_nowait()
        except anyio.WouldBlock:
            if self.waiting >= self.limits.queue_limit:
                return False
            self.waiting += 1
            try:
                await self.places.acquire()
            finally:
                self.waiting -= 1
        if self.pace is not None:
            try:
                await self.pace.wait()
            except BaseException:
                self.places.release()
                raise
        return True


class Limited(Wrapped):
    """A toolset under limits, each tool under its own. `breaker` belongs to the server behind, where there is one, and
    `store` to all whose media should lie in memory once."""

    def __init__(
        self,
        inner: Toolset,
        limits: Limits | Callable[[str], Limits],
        breaker: Breaker | None = None,
        store: Store | None = None,
    ) -> None:
        super().__init__(inner)
        self.store = Store() if store is None else store
        self.limits = limits if callable(limits) else lambda name: limits
        self.breaker = breaker
        self._gates: dict[str, Gate] = {}
        self._seen: Sequence[ToolSpec] | None = None
        self._specs: tuple[ToolSpec, ...] = ()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        inner = self.inner.specs
        if inner is not self._seen:
            self._specs = tuple(self._declared(spec) for spec in inner)
            self._seen = inner
        return self._specs

    def _declared(self, spec: ToolSpec) -> ToolSpec:
        """The operator's word that a tool is pure counts beside its owner's hints."""
        if not self.limits(spec.name).pure:
            return spec
        return replace(spec, hints=replace(spec.hints, pure=True))

    def gate(self, name: str) -> Gate:
        gate = self._gates.get(name)
        if gate is None:
            gate = self._gates[name] = Gate(self.limits(name), self.store)
        return gate

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Session]:
        async with self.inner.open(task) as session:
            yield _LimitedSession(session, self)


class _LimitedSession:
    __slots__ = ("_owner", "_session")

    def __init__(self, session: Session, owner: Limited) -> None:
        self._session, self._owner = session, owner

    @property
    def specs(self) -> Sequence[ToolSpec]:
        return self._owner.specs

    async def finish(self) -> dict[str, float]:
        return dict(await self._session.finish())

    async def call(self, call: ToolCall, context: Context = ALONE) -> ToolResult:
        gate = self._owner.gate(call.name)
        limits = gate.limits
        began = anyio.current_time()
        started: float | None = None
        with anyio.move_on_after(limits.timeout_s):
            if not await gate.enter():
                return refusal(f"{limits.queue_limit} calls of {call.name!r} are waiting already")
            try:
                started = anyio.current_time()
                result = await self._attempts(call, context, limits.retries)
                return await gate.admit(await gate.cut(_timed(result, queue=started - began)))
            finally:
                gate.places.release()
        if started is None:
            return refusal(f"no place to run {call.name!r} came free within {limits.timeout_s:g} s")
        return self._late(call, limits.timeout_s)

    def _late(self, call: ToolCall, limit_s: float) -> ToolResult:
        if self._owner.breaker is not None:
            self._owner.breaker.record(Outcome.TIMEOUT)
        text = f"The tool {call.name!r} did not answer within {limit_s:g} seconds."
        return ToolResult((Text(text),), Outcome.TIMEOUT, reason=f"no answer within {limit_s:g} s")

    async def _attempts(self, call: ToolCall, context: Context, retries: int) -> ToolResult:
        pause_s = FIRST_PAUSE_S
        attempt = 1
        result = await self._attempt(call, context)
        while attempt <= retries and self._safe_to_repeat(call.name, result.outcome):
            await anyio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter is no secret
            pause_s *= 2
            attempt += 1
            result = await self._attempt(call, context)
        return result if attempt == 1 else replace(result, attempts=attempt)

    def _safe_to_repeat(self, name: str, outcome: Outcome) -> bool:
        if outcome is not Outcome.UNKNOWN:
            return outcome is Outcome.UNAVAILABLE
        return any(spec.hints.repeatable for spec in self._owner.specs if spec.name == name)

    async def _attempt(self, call: ToolCall, context: Context) -> ToolResult:
        breaker = self._owner.breaker
        if breaker is None:
            return await self._session.call(call, context)
        if not breaker.admit():
            return refusal("the server failed many times in a row and is given a pause")
        began = anyio.current_time()
        result = await self._session.call(call, context)
        breaker.record(result.outcome, began)
        return result


def refusal(reason: str) -> ToolResult:
    """A call that was never delivered. The policy reads that it is not to blame."""
    return ToolResult((Text("The tool is not available right now."),), Outcome.UNAVAILABLE, reason=reason)


def _timed(result: ToolResult, queue: float) -> ToolResult:
    return replace(result, timing={**result.timing, "queue": queue}) if queue > 0.0005 or result.timing else result
