"""Gateway sessions: one rollout's tools, interaction and rewards, from opening to release."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard

import anyio

from gateway.argument_checks import ArgumentChecks, CheckTimeoutError
from gateway.errors import SessionError, Unavailable
from gateway.limits import CANCELLED as CANCELLED
from gateway.limits import CallScope as CallScope
from gateway.limits import call_scope
from gateway.schema import checker_for
from gateway.session_protocols import AnyGateway as AnyGateway
from gateway.session_protocols import AnySession as AnySession
from gateway.session_protocols import Reward as Reward
from gateway.tool_table import OfferedTool, Source, ToolTable, select_tools
from gateway.toolset import NO_SUCH_TOOL, PLANTED, Session, hash_session_state, unknown_tool_result
from gateway.types import (
    DEFAULT_CONTEXT,
    EMPTY,
    Context,
    Feedback,
    Outcome,
    Task,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    with_times,
)

log = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 5.0
"""Limit for cancelled calls to end when a session closes."""
REWARDS_TIMEOUT_S = 60.0
"""Limit for collecting final rewards; without them, resources are still released."""
RELEASE_TIMEOUT_S = 30.0
"""Limit for releasing everything that a session holds."""

WITHDRAWN = ToolResult(
    (Text("The tool is not available any more."),), Outcome.UNAVAILABLE, reason="its owner no longer offers it"
)
"""The policy was shown the tool when the session opened, so that calling it is not the policy's error."""


_NO_SCOPE = nullcontext()


class FeedbackSession(Session, Protocol):
    """A session whose toolset has an interaction."""

    @property
    def name(self) -> str | None: ...

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback: ...


def has_feedback(session: Session) -> TypeGuard[FeedbackSession]:
    """Whether the session can give feedback."""
    return hasattr(session, "feedback")


class RunningCall(NamedTuple):
    """A call that has started and not ended."""

    name: str
    since: float
    """`time.monotonic()` at its start."""


class ObservedCall(NamedTuple):
    """A finished call, as observers receive it."""

    session_id: str
    call: ToolCall
    spec: ToolSpec | None
    result: ToolResult


Observer = Callable[[ObservedCall], None]
ClosingStep = tuple[str, float, Callable[[], Awaitable[object]]]
"""What failed if it fails, its limit in seconds, and what it does."""


class GatewaySession:
    """A session of a `Gateway`. `Gateway.begin` creates it and puts what it must release on its `stack`."""

    def __init__(
        self, id: str, task: Task, table: ToolTable, observers: Sequence[Observer], checks: ArgumentChecks
    ) -> None:
        self.id, self.task = id, task
        self.rewards: list[Reward] = []
        self.states: dict[str, str] = {}
        self.ttl_s = task.ttl_s
        self.stack = AsyncExitStack()
        self.source_sessions: dict[int, Session] = {}
        """The session on each source, by the source's `id()`."""
        self.feedback_session: FeedbackSession | None = None
        self.closed = False
        self.late_servers: Sequence[str] = ()
        """The servers that were still starting when this session opened, so that it lacks their tools."""
        self._tools = select_tools(task, table)
        self.sources = [*dict.fromkeys(tool.source for tool in self._tools.values())]
        """The sources that it uses, in the gateway's order."""
        self._observers, self._checks = observers, checks
        self._scopes: dict[CallScope | anyio.CancelScope, tuple[str, float]] = {}
        """What cancels the calls under way; of each, what its `RunningCall` has."""
        self._finished: dict[str, float] | None = None
        self.has_rewards = True
        """Whether closing it could collect the rewards."""
        self._is_abandoned = False
        self._grading: anyio.CancelScope | None = None
        """What a source that takes long for its rewards runs in."""
        self._is_released = False
        self._done_closing: anyio.Event | None = None
        """Set when everything is released, where another task waits for that."""
        self._call_ended: anyio.Event | None = None
        """Set when a call ends, while the closing session waits for that."""
        self._asking: anyio.Lock | None = None
        self._used_at = time.monotonic()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools that the policy may call; fixed when the session opens, like the policy's prompt."""
        return [tool.spec for tool in self._tools.values() if tool.spec.audience == "policy"]

    @property
    def remaining_s(self) -> float | None:
        """Seconds until it expires; each use restarts the time, which does not run during a call."""
        if self.ttl_s is None or self._scopes:
            return self.ttl_s
        return max(0.0, self._used_at + self.ttl_s - time.monotonic())

    @property
    def running(self) -> list[RunningCall]:
        """Calls under way, oldest first."""
        return [RunningCall(*call) for call in self._scopes.values()]

    @property
    def finish_s(self) -> float:
        """How long the sources may take for their last rewards, one after the other."""
        return sum(map(_finish_s, self.sources))

    @property
    def feedback_name(self) -> str | None:
        """The name of its interaction."""
        return self.task.feedback or (None if self.feedback_session is None else self.feedback_session.name)

    def add_own_tools(self, source: Source, specs: Sequence[ToolSpec]) -> None:
        """Offers tools that a source has for this session alone, in place of those with the same names."""
        if specs:  # Else it shares the table's: a copy of a thousand tools takes 36 KiB.
            own = {spec.name: OfferedTool(spec, spec.name, source, checker_for(spec.parameters)) for spec in specs}
            self._tools = {**self._tools, **own}

    def task_for(self, source: Source) -> Task:
        """The task with tools under the names that a source uses."""
        own_tools = {name: tool for name, tool in self._tools.items() if tool.source is source}
        tools = tuple(tool.source_name for tool in own_tools.values())
        create = {own_tools[name].source_name: kwargs for name, kwargs in self.task.create.items() if name in own_tools}
        if (tools, create) == (self.task.tools, self.task.create):
            return self.task
        return replace(self.task, tools=tools, create=create)

    async def call(
        self, call: ToolCall, context: Context = DEFAULT_CONTEXT, scope: CallScope | None = None
    ) -> ToolResult:
        """Runs one call. Never raises for what a tool did: every way to end is an outcome.

        With `scope` the caller can cancel it; a closing session cancels it, too.
        """
        scope = scope or CallScope()
        began_at, scope.is_taken = self._touch(), False
        scope.began_at = began_at
        tool = self._tools.get(call.name)
        if tool is not None and tool.spec.audience == "loop" and context.audience != "loop":
            tool = None
        result = CANCELLED
        self._scopes[scope] = call.name, began_at
        token = call_scope.set(scope)
        try:
            if tool is None:
                result = self._missing_tool_result(call.name)
            elif problem := await self._checks.explain_error(tool.checker, call.arguments, scope, tool.timeout_s):
                result = ToolResult((Text(problem),), Outcome.INVALID, reason="arguments do not match the schema")
            else:
                inner, source = self.source_sessions[id(tool.source)], tool.source
                if source.answers is not None and context.answer_request is None and self.feedback_session is not None:
                    context = source.answers.with_interaction(context, self._ask_interaction)
                with _NO_SCOPE if source.is_limited else scope.open(is_call=True):
                    answer = await inner.call(call.renamed(tool.source_name), context)
                    result = await source.admit(answer) if source.admit else answer
                    if answer.reason == NO_SUCH_TOOL:
                        result = WITHDRAWN
        except CheckTimeoutError as error:
            if not scope.is_cancelled:
                text, reason = str(error), "the arguments were not checked in time"
                result = ToolResult((Text(text),), Outcome.TIMEOUT, reason=reason)
        except Exception as error:
            # Boundary: a source that raises breaks its contract, but must not end the rollout.
            log.exception("source of %r failed", call.name)
            text, reason = "The tool failed unexpectedly.", f"{type(error).__name__}: {error}"
            result = ToolResult((Text(text),), Outcome.UNKNOWN, reason=reason)
        finally:
            call_scope.reset(token)
            self._end_call(scope)
            result = with_times(result, result.timing, self._used_at - began_at)
            self._record_result(call, tool, result)
        return result

    def _missing_tool_result(self, name: str) -> ToolResult:
        if not self.late_servers or name in self._tools:
            return unknown_tool_result(name, self.specs)
        names = ", ".join(map(repr, self.late_servers))
        reason = f"this session opened while these servers were still starting: {names}; open a new one for their tools"
        return ToolResult((Text(f"The tool {name!r} is not available."),), Outcome.UNAVAILABLE, reason=reason)

    def _record_result(self, call: ToolCall, tool: OfferedTool | None, result: ToolResult) -> None:
        if result.reward is not None:
            kind: Literal["call", "feedback"] = "feedback" if tool and tool.spec.audience == "loop" else "call"
            self.rewards.append(Reward(call.name, result.reward, kind, call.id))
        if self._observers:
            observed = ObservedCall(self.id, call, tool.spec if tool else None, result)
            for observe in self._observers:
                observe(observed)

    async def calls(
        self, calls: Sequence[ToolCall], context: Context = DEFAULT_CONTEXT, scope: CallScope | None = None
    ) -> list[ToolResult]:
        """Runs all calls of one message concurrently, those into a source that is `in_order` one after the other.

        The results keep the order of the calls. With `scope` the caller can cancel them.
        """
        if len(calls) == 1:
            return [await self.call(calls[0], context, scope)]
        self._touch()
        results: list[ToolResult | None] = [None] * len(calls)

        async def call_each(indices: Sequence[int]) -> None:
            for index in indices:
                if self.closed:
                    return  # the others are cancelled
                results[index] = await self.call(calls[index], context)

        with _NO_SCOPE if scope is None else scope.open():
            async with anyio.create_task_group() as tasks:
                for indices in self._split_by_order(calls):
                    tasks.start_soon(call_each, indices)
        return [result or CANCELLED for result in results]

    def _split_by_order(self, calls: Sequence[ToolCall]) -> list[list[int]]:
        """The calls by their index: together those that run one after the other."""
        runs: dict[str | int, list[int]] = {}
        for index, call in enumerate(calls):
            tool = self._tools.get(call.name)
            runs.setdefault(tool.source.key if tool is not None and tool.source.in_order else index, []).append(index)
        return [*runs.values()]

    async def _ask_interaction(self, question: str) -> Feedback:
        """The interaction's reply to a tool's question. It is no turn of the policy's, so its score does not count."""
        if self.feedback_session is None:
            raise SessionError("this session has no interaction")
        self._asking = self._asking or anyio.Lock()
        async with self._asking:
            return await self.feedback_session.feedback([{"role": "assistant", "content": question}])

    async def feedback(self, messages: Sequence[Mapping[str, Any]]) -> Feedback:
        """Runs one turn of the session's interaction."""
        self._touch()
        if self.feedback_session is None:
            raise SessionError("this gateway has no feedback interaction; add one under `interaction:` in a YAML file")
        with anyio.CancelScope() as scope:
            self._scopes[scope] = self.feedback_session.name or "feedback", time.monotonic()
            try:
                feedback = await self.feedback_session.feedback(messages)
            finally:
                self._end_call(scope)
            if not feedback.outcome.is_infrastructure:
                self.rewards.append(Reward(self.feedback_session.name or "feedback", feedback.score, "feedback"))
            return feedback
        return Feedback(outcome=Outcome.CANCELLED, reason="session closed")

    async def finish(self) -> Mapping[str, float]:
        """The rewards that tools give at the end of a rollout; collected once, even if called again."""
        if self._finished is None:
            self._finished = {}
            for source in self.sources:
                if not (rewards := await self._finish_source(source)):
                    continue
                names = {tool.source_name: name for name, tool in self._tools.items() if tool.source is source}
                for inner, value in rewards.items():
                    name = names.get(inner, inner)
                    if name.endswith(PLANTED):
                        self.rewards.append(Reward(name, value, "count"))
                        continue
                    self._finished[name] = value
                    self.rewards.append(Reward(name, value, "end"))
            if self.task.hash_state:
                self.states = await self.hash_states()
        return self._finished

    async def _finish_source(self, source: Source) -> Mapping[str, float]:
        """The last rewards of a source. A slow one, such as a grader, is not asked in an abandoned session."""
        finish = self.source_sessions[id(source)].finish
        if not _finish_s(source):
            return await finish()
        if not self._is_abandoned:
            with anyio.CancelScope() as self._grading:
                return await finish()
        self.has_rewards = False
        if self._grading is None:
            return EMPTY
        raise Unavailable("the session was closed while it was graded")

    async def hash_states(self) -> dict[str, str]:
        """The hashes of what the session's calls have left so far, by server; a sandbox's is named `sandbox`, after
        the entry's prefix. Of several with one name, the second is `NAME_2`, and so on."""
        hashes: dict[str, str] = {}
        for source in self.sources:
            state = await hash_session_state(self.source_sessions[id(source)])
            if state is None:
                continue
            numbered = (f"{source.state_name}_{number}" if number > 1 else source.state_name for number in count(1))
            hashes[next(name for name in numbered if name not in hashes)] = state
        return hashes

    async def close(self, *, is_abandoned: bool = False) -> None:
        """Cancels running calls, collects final rewards, releases everything. Safe to call again, from any task.

        An abandoned session, whose rewards nobody wants, is not graded, and a grade that runs is ended.
        """
        if is_abandoned:
            self._is_abandoned = True
            if self._grading is not None:
                self._grading.cancel()
        if self.closed:
            if not self._is_released:
                self._done_closing = self._done_closing or anyio.Event()
                await self._done_closing.wait()
            return
        self.closed = True
        for scope in list(self._scopes):
            scope.cancel()
        steps: list[ClosingStep] = [
            ("no final rewards", REWARDS_TIMEOUT_S + self.finish_s, self._collect_rewards),
            ("not everything was released", RELEASE_TIMEOUT_S, self.stack.aclose),
        ]
        if self._scopes:
            steps.insert(0, ("its calls did not end", CANCEL_TIMEOUT_S, self._wait_for_calls))
        while steps:
            await self._take_closing_steps(steps)
        self._is_released = True
        if self._done_closing is not None:
            self._done_closing.set()

    async def _take_closing_steps(self, steps: list[ClosingStep]) -> None:
        """Takes the next steps of closing, until one is late; logs a failure, so that the next one runs.

        They share a scope, which costs more than most steps do.
        """
        with anyio.move_on_after(steps[0][1], shield=True) as scope:
            while steps and not scope.cancel_called:
                failure, within_s, step = steps.pop(0)
                try:
                    await step()
                except Exception:  # boundary: a failing reward must not prevent the release
                    log.exception("a session of task %r: %s", self.task.id, failure)
                if steps:
                    scope.deadline = anyio.current_time() + steps[0][1]
        if scope.cancelled_caught:
            log.error("a session of task %r: %s within %s s", self.task.id, failure, within_s)

    async def _collect_rewards(self) -> None:
        try:
            await self.finish()
        except BaseException:
            self.has_rewards = False
            raise

    async def _wait_for_calls(self) -> None:
        """Waits until no call runs, because a final reward must see the effects of all calls."""
        while self._scopes:
            self._call_ended = anyio.Event()
            await self._call_ended.wait()

    def _end_call(self, scope: CallScope | anyio.CancelScope) -> None:
        self._scopes.pop(scope, None)
        self._used_at = time.monotonic()
        if self._call_ended is not None:
            self._call_ended.set()

    def _touch(self) -> float:
        """Notes that it is used; returns the time."""
        if self.closed:
            raise SessionError("the session is closed")
        self._used_at = time.monotonic()
        return self._used_at


def _finish_s(source: Source) -> float:
    return float(getattr(source.backend, "finish_s", 0.0))
