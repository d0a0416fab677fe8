"""Sends an answer as server-sent events while the policy writes it; a client that hangs up ends the generation."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
from starlette.types import Receive, Scope, Send

from gateway.http.endpoint import DisconnectWatcher
from gateway.http.exchange import ClientDisconnected, Response
from mtrl_plugins.agents.event_writer import KEEP_ALIVE, EventWriter
from mtrl_plugins.agents.policy_request import PolicyAnswer, PolicyProblem, TurnDelta, TurnStart
from mtrl_plugins.agents.turn_stream import TurnListener

log = logging.getLogger(__name__)
KEEP_ALIVE_S = 10.0
"""After so long without an event a comment is sent, so that neither side takes the connection for dead."""
STALLED_S = 60.0
"""A client that reads nothing for so long is taken for gone."""
FAILED = "the endpoint failed; the run's log says why"
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
)


class AnswerStream:
    """An answer as an ASGI application. Problems before the first event are answers with a status of their own."""

    def __init__(
        self,
        answer: Callable[[TurnListener], Awaitable[PolicyAnswer]],
        events: EventWriter,
        write_problem: Callable[[PolicyProblem], bytes],
        disconnects: DisconnectWatcher,
    ) -> None:
        self._answer, self._events, self._write_problem = answer, events, write_problem
        self._disconnects = disconnects
        self._waiting: list[TurnDelta] = []
        """What was not sent yet."""
        self._start: TurnStart | None = None
        self._news = anyio.Event()
        self._has_started = self._is_stalled = False

    def on_start(self, start: TurnStart) -> None:
        self._start = start
        self._news.set()

    def on_delta(self, delta: TurnDelta) -> None:
        self._waiting.append(delta)
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._disconnects.run_until_disconnect(receive, lambda: self._run(scope, receive, send))
        except ClientDisconnected:
            return

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._send_news, send, tasks.cancel_scope)
            answer, problem = await self._await_answer()
            tasks.cancel_scope.cancel()
        if self._is_stalled:
            raise ClientDisconnected
        if problem is not None and not self._has_started:
            await Response(self._write_problem(problem), problem.status)(scope, receive, send)
            return
        await self._send(send, self._take_news())
        last = (
            self._events.end(answer) if answer else self._events.fail(problem or PolicyProblem("unavailable", FAILED))
        )
        await send({"type": "http.response.body", "body": last})

    async def _await_answer(self) -> tuple[PolicyAnswer | None, PolicyProblem | None]:
        try:
            return await self._answer(self), None
        except PolicyProblem as problem:
            return None, problem
        except Exception:  # boundary: one request must not end the run
            log.exception("a request of an agent failed")
            return None, PolicyProblem("unavailable", FAILED)

    async def _send_news(self, send: Send, work: anyio.CancelScope) -> None:
        while True:
            with anyio.move_on_after(KEEP_ALIVE_S):
                await self._news.wait()
            self._news = anyio.Event()
            # Half an event must not be lost at the end of the turn.
            with anyio.move_on_after(STALLED_S, shield=True) as sending:
                await self._send(send, self._take_news() or KEEP_ALIVE)
            if sending.cancelled_caught:
                self._is_stalled = True
                work.cancel()

    def _take_news(self) -> bytes:
        deltas, self._waiting = self._waiting, []
        first, self._start = self._start, None
        events = [self._events.begin(first)] if first else []
        return b"".join([*events, *map(self._events.add, deltas)])

    async def _send(self, send: Send, events: bytes) -> None:
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if events:
            await send({"type": "http.response.body", "body": events, "more_body": True})
