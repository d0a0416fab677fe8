"""Limits on calls of a tool: concurrency, queue, rate, deadline, retries, result size, and a circuit breaker.

A call is retried only if it was never delivered, or if the tool's owner declares repeating it safe.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import replace
from time import monotonic

import anyio

from gateway.config.models import Limits
from gateway.media.media_filter import MediaFilter, MediaStore
from gateway.toolset import RenamedToolset, Session, SessionWrapper, Toolset, ToolsetWrapper
from gateway.truncate import make_truncator
from gateway.types import DEFAULT_CONTEXT, Context, Outcome, Task, Text, ToolCall, ToolResult, ToolSpec, with_times

FIRST_RETRY_DELAY_S = 0.05
"""Delay before the first retry; doubled for each further one."""
FAIR_SHARE = 0.5
"""The part of its limit that a tool must have had, so that a late answer is its own fault."""
CANCELLED = ToolResult((Text("The call was cancelled."),), Outcome.CANCELLED, reason="cancelled by its caller")


class CallScope:
    """What cancels one call, and what is known of its time.

    Its tool's limit opens the cancel scope, with its deadline, or the session where the tool has no limit: a scope of
    each would cost a twentieth of a call more. Who has cancelled tells a call that was given up from a late one.
    """

    __slots__ = ("_scope", "began_at", "explain_silence", "is_cancelled", "is_taken", "limit_s", "tool_s")

    def __init__(self, began_at: float = 0.0) -> None:
        self.began_at = began_at
        """From when the deadline counts, with the check of the arguments."""
        self.is_cancelled = self.is_taken = False
        """`is_taken`: the call that it was made for runs in it; those that its tool makes have scopes of their own."""
        self.limit_s = self.tool_s = 0.0
        """The time limit, and how much of that its tool has had: the rest went into queues and starts."""
        self.explain_silence: Callable[[], str] = str
        """Why no answer was taken, where it is not that none came."""
        self._scope: anyio.CancelScope | None = None

    def open(self, within_s: float = math.inf, *, is_call: bool = False) -> anyio.CancelScope:
        """A cancel scope, to be entered at once: for the call itself (`is_call`), or for what precedes it."""
        self.is_taken |= is_call
        self._scope = anyio.move_on_after(within_s)
        if self.is_cancelled:
            self._scope.cancel()
        return self._scope

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    def count(self, seconds: float) -> bool:
        """Adds what the tool has had; whether that makes a fair share of the limit."""
        self.tool_s += seconds
        return self.tool_s >= FAIR_SHARE * self.limit_s


call_scope: ContextVar[CallScope | None] = ContextVar("call_scope", default=None)
"""The scope of the call that this task passes on."""


def count_tool_time(seconds: float) -> bool:
    """Counts time that a tool has had of its call; whether a late answer is the tool's own fault by now."""
    return (scope := call_scope.get()) is None or scope.count(seconds)


def timeout_of(toolset: Toolset, name: str) -> float:
    """The seconds that a call of a tool may take; infinite if nothing limits it."""
    while isinstance(toolset, ToolsetWrapper):
        if isinstance(toolset, LimitedToolset):
            return toolset.limits(name).timeout_s
        if isinstance(toolset, RenamedToolset):
            name = toolset.inner_names.get(name, name)
        toolset = toolset.inner
    return math.inf


def count_calls(toolset: Toolset) -> tuple[int, int]:
    """The calls of a toolset that run now, and those that wait for their turn."""
    while isinstance(toolset, ToolsetWrapper):
        if isinstance(toolset, LimitedToolset):
            limiters = toolset.limiters.values()
            running = sum(limiter.limits.at_once - limiter.slots.value for limiter in limiters)
            return running, sum(limiter.waiting for limiter in limiters)
        toolset = toolset.inner
    return 0, 0


class RateLimiter:
    """Limits the calls that start per second; start times are reserved in advance, so that callers keep their order."""

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


class CircuitBreaker:
    """Stops calls to a server that keeps failing, and lets one call through after a pause to test it."""

    def __init__(self, failures: int = 8, pause_s: float = 5.0) -> None:
        self._max_failures, self._pause_s = failures, pause_s
        self._failures = 0
        self._failed_at = -math.inf
        self._open_until = -math.inf

    @property
    def is_open(self) -> bool:
        return self._failures >= self._max_failures and monotonic() < self._open_until

    def admit(self) -> bool:
        """Whether a call may go through. After the pause, one call may; the breaker stays open until it succeeds."""
        if self._failures < self._max_failures:
            return True
        now = monotonic()
        if now < self._open_until:
            return False
        self._open_until = now + self._pause_s
        return True

    def record(self, outcome: Outcome, started_at: float = math.inf) -> None:
        """Counts failures. Concurrent calls that fail when a server dies count as one failure."""
        if not outcome.is_infrastructure:
            self._failures = 0
        elif outcome is not Outcome.CANCELLED and started_at >= self._failed_at:
            self._failed_at = monotonic()
            self._failures += 1
            if self._failures >= self._max_failures:
                self._open_until = monotonic() + self._pause_s


class ToolLimiter:
    """The limits of one tool, with the calls that run and wait."""

    def __init__(self, limits: Limits, store: MediaStore) -> None:
        self.limits = limits
        self.slots = anyio.Semaphore(limits.at_once, fast_acquire=True)
        self.rate_limiter = RateLimiter(limits.rate_per_s) if limits.rate_per_s else None
        self.truncate = make_truncator(limits.result_limit)
        self.admit = MediaFilter(limits.media, store)
        self.waiting = 0

    async def acquire(self) -> bool:
        """Acquires a slot, then waits for the rate limit; False if too many calls are waiting already."""
        try:
            self.slots.acquire_nowait()
        except anyio.WouldBlock:
            if self.waiting >= self.limits.queue_limit:
                return False
            self.waiting += 1
            try:
                await self.slots.acquire()
            finally:
                self.waiting -= 1
        if self.rate_limiter is not None:
            try:
                await self.rate_limiter.wait()
            except BaseException:
                self.slots.release()
                raise
        return True


class LimitedToolset(ToolsetWrapper):
    """Applies limits to a toolset, per tool.

    `breaker` is that of the server behind the toolset. Toolsets that share a `store` keep equal media in memory once.
    """

    def __init__(
        self,
        inner: Toolset,
        limits: Limits | Callable[[str], Limits],
        breaker: CircuitBreaker | None = None,
        store: MediaStore | None = None,
    ) -> None:
        super().__init__(inner)
        self.store = MediaStore() if store is None else store
        self.limits = limits if callable(limits) else lambda name: limits
        self.breaker = breaker
        self.limiters: dict[str, ToolLimiter] = {}
        self._listed: Sequence[ToolSpec] | None = None
        self._specs: tuple[ToolSpec, ...] = ()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        inner = self.inner.specs
        if inner is not self._listed:
            self._specs = tuple(self._with_declared_hints(spec) for spec in inner)
            self._listed = inner
        return self._specs

    def _with_declared_hints(self, spec: ToolSpec) -> ToolSpec:
        """Adds `pure`, which the operator declares, to the hints of the tool's owner."""
        if not self.limits(spec.name).pure:
            return spec
        return replace(spec, hints=replace(spec.hints, pure=True))

    def limiter(self, name: str) -> ToolLimiter:
        limiter = self.limiters.get(name)
        if limiter is None:
            limiter = self.limiters[name] = ToolLimiter(self.limits(name), self.store)
        return limiter

    def open(self, task: Task) -> AbstractAsyncContextManager[Session]:
        return _LimitedSession(self.inner.open(task), self)


class _LimitedSession(SessionWrapper):
    __slots__ = ()
    _owner: LimitedToolset

    async def call(self, call: ToolCall, context: Context = DEFAULT_CONTEXT) -> ToolResult:
        limiter, breaker = self._owner.limiter(call.name), self._owner.breaker
        limits, queued_at = limiter.limits, monotonic()
        started_at, delay_s = None, FIRST_RETRY_DELAY_S
        scope, token = call_scope.get(), None
        if scope is None or scope.is_taken:
            began_at = queued_at
            if scope is not None and not scope.limit_s:  # The session's, for a call that has met no other limit yet.
                began_at, scope.limit_s = scope.began_at, limits.timeout_s
            scope = CallScope(began_at)
            token = call_scope.set(scope)
        scope.limit_s = limits.timeout_s
        try:
            with scope.open(limits.timeout_s - (queued_at - scope.began_at), is_call=True):
                if not await limiter.acquire():
                    waiting = f"{limits.queue_limit} calls of {call.name!r} are waiting already (`queue_limit`)"
                    return unavailable_result(waiting)
                try:
                    started_at = monotonic()
                    for attempt in range(1, limits.retries + 2):
                        if breaker is None:
                            result = await self._session.call(call, context)
                        elif breaker.admit():
                            sent_at = monotonic()
                            result = await self._session.call(call, context)
                            breaker.record(result.outcome, sent_at)
                        else:
                            result = unavailable_result(
                                "the server failed many times in a row; calls are paused for a moment"
                            )
                        if attempt > limits.retries or not self._is_retryable(call.name, result.outcome):
                            break
                        await anyio.sleep(delay_s * random.uniform(0.5, 1.5))  # noqa: S311 - jitter is no secret
                        delay_s *= 2
                    result = _with_queue_time(result, started_at - queued_at, attempt)
                    if limiter.truncate is not None:
                        result = await limiter.truncate(result)
                    return await limiter.admit(result)
                finally:
                    limiter.slots.release()
        finally:
            if token is not None:
                call_scope.reset(token)
        return CANCELLED if scope.is_cancelled else self._late_result(call, scope, started_at)

    def _late_result(self, call: ToolCall, scope: CallScope, started_at: float | None) -> ToolResult:
        """The result of a call that has reached its limit, in the queue where it never started."""
        if started_at is None:
            return unavailable_result(f"no slot for {call.name!r} became free within {scope.limit_s:g} s")
        if self._owner.breaker is not None:
            self._owner.breaker.record(Outcome.TIMEOUT)
        text = f"The tool {(call.policy_name or call.name)!r} did not answer within {scope.limit_s:g} seconds."
        reason = f"no answer within {scope.limit_s:g} s" + (f": {why}" if (why := scope.explain_silence()) else "")
        return ToolResult((Text(text),), Outcome.TIMEOUT, reason=reason)

    def _is_retryable(self, name: str, outcome: Outcome) -> bool:
        if outcome is not Outcome.UNKNOWN:
            return outcome is Outcome.UNAVAILABLE
        return any(spec.hints.repeatable for spec in self._owner.specs if spec.name == name)


def unavailable_result(reason: str) -> ToolResult:
    """The result of a call that was never delivered; its text tells the policy that the tool is unavailable."""
    return ToolResult((Text("The tool is not available right now."),), Outcome.UNAVAILABLE, reason=reason)


def _with_queue_time(result: ToolResult, queue_s: float, attempts: int) -> ToolResult:
    if attempts > 1:
        result = replace(result, attempts=attempts)
    return with_times(result, {**result.timing, "queue": queue_s}) if queue_s > 0.0005 or result.timing else result
