"""A call that asks its caller back waits, while the caller goes away for the answer and returns.

Since 2026 a server cannot ask: it answers with its questions, and the client repeats the request with the answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from anyio.abc import TaskGroup
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS

from gateway.errors import Refused
from gateway.front.behind import refuse_unable
from gateway.types import Context

PATIENCE_S = 600.0
"""For an answer; a tool's own deadline usually ends the wait before."""
MOST_HELD = 1024

Work = Callable[[Context], Awaitable[dict[str, Any]]]
Question = Mapping[str, Any]


class Held:
    """One call under way, and whoever waits for it now."""

    def __init__(self, about: Mapping[str, Any], given: Mapping[str, Any], context: Context) -> None:
        self.about = about
        self.context = context
        self.open: dict[str, Question] = {}
        """What it wants to know."""
        self.scope = anyio.CancelScope()
        self.turn = anyio.Event()
        """There is something to tell: questions, or the end."""
        self.state = ""
        """Names it while it waits."""
        self.result: dict[str, Any] | None = None
        self.error: Exception | None = None
        self._given = dict(given)
        self._back = anyio.Event()

    async def run(self, work: Work) -> None:
        inner = Context(
            progress=self._progress if self.context.progress else None,
            notice=self._notice if self.context.notice else None,
            ask=self._ask,
            inputs=self._inputs,
            meta=self.context.meta,
        )
        with self.scope:
            try:
                self.result = await work(inner)
            except Exception as error:  # boundary: raised again where the caller waits for it
                self.error = error
        if self.result is None and self.error is None:
            self.error = MCPError(INTERNAL_ERROR, "The call was ended.")
        self.turn.set()

    def resume(self, given: Mapping[str, Any], context: Context) -> None:
        """The caller is back; from now on it hears through its new request."""
        self.context = context
        self._given.update(given)
        self.open = {}
        self.turn, self._back, back = anyio.Event(), anyio.Event(), self._back
        back.set()

    async def _inputs(self, wanted: Mapping[str, Question]) -> dict[str, Any]:
        """What is still missing is asked for again, as often as the caller comes back without it."""
        for asked in wanted.values():
            refuse_unable(str(asked.get("method")), self.context.meta)
        while missing := {key: asked for key, asked in wanted.items() if key not in self._given}:
            self.open.update(missing)
            back = self._back
            self.turn.set()
            with anyio.move_on_after(PATIENCE_S):
                await back.wait()
            if not back.is_set():
                raise Refused(f"no answer came within {PATIENCE_S:g} s")
        return {key: self._given.pop(key) for key in wanted}

    async def _ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        key = f"question-{secrets.token_hex(4)}"
        answers = await self._inputs({key: {"method": method, "params": dict(params)}})
        answer: Mapping[str, Any] = answers[key]
        return answer

    async def _progress(self, done: float, total: float | None, message: str | None) -> None:
        if self.context.progress is not None:
            await self.context.progress(done, total, message)

    async def _notice(self, method: str, params: Mapping[str, Any]) -> None:
        if self.context.notice is not None:
            await self.context.notice(method, params)


class Desk:
    """Where held calls wait. What names one cannot be guessed, works once, and only for the same request."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._held: dict[str, Held] = {}

    async def serve(self, params: Mapping[str, Any], context: Context, work: Work) -> dict[str, Any]:
        """The result of the work, or the questions that it has."""
        held = self._take(params, context) if "requestState" in params else self._begin(params, context, work)
        try:
            await held.turn.wait()
        except BaseException:
            held.scope.cancel()
            raise
        if held.result is not None:
            return held.result
        if held.error is not None:
            raise held.error
        state = secrets.token_urlsafe(24)
        self._held[state] = held
        held.state = state
        return {"resultType": "input_required", "inputRequests": held.open, "requestState": state}

    def _begin(self, params: Mapping[str, Any], context: Context, work: Work) -> Held:
        if len(self._held) >= MOST_HELD:
            raise MCPError(INTERNAL_ERROR, f"{MOST_HELD} calls wait for an answer already")
        held = Held(_about(params), params.get("inputResponses") or {}, context)
        self._tasks.start_soon(self._run, held, work)
        return held

    def _take(self, params: Mapping[str, Any], context: Context) -> Held:
        held = self._held.pop(str(params["requestState"]), None)
        if held is None or held.about != _about(params):
            raise MCPError(INVALID_PARAMS, "requestState is not of this request, is used up, or has expired")
        held.resume(params.get("inputResponses") or {}, context)
        return held

    async def _run(self, held: Held, work: Work) -> None:
        """A call may end while nobody waits for it, at its own deadline or when an answer does not come."""
        await held.run(work)
        self._held.pop(held.state, None)


def _about(params: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in ("_meta", "inputResponses", "requestState")}
