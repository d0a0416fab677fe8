"""Calls that outlive the request that began them: they pause for input of the client, or become tasks.

Modern clients (since 2026) cannot be sent requests. A call that needs input returns `input_required`, waits here, and
resumes when the client repeats its request with the answers. A long one becomes a task, if the client knows tasks.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import anyio
from anyio.abc import TaskGroup
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS

from gateway.errors import RequestDeclined
from gateway.mcp_server import client_context
from gateway.mcp_server.call_tasks import CallTask, CallTasks
from gateway.mcp_server.client_context import require_capability
from gateway.types import Context

MAX_WAITING_CALLS = 1024
TASK_AFTER_S = 5.0
"""How long a call may take before it becomes a task. One that its server made a task becomes one at once."""

Handler = Callable[[Context], Awaitable[dict[str, Any]]]
InputRequest = Mapping[str, Any]


class ResumableCall:
    """A call under way that pauses while its client fetches requested inputs."""

    def __init__(self, request_params: Mapping[str, Any], input_responses: Mapping[str, Any], context: Context) -> None:
        self.request_params = request_params
        self.context = context
        self.input_requests: dict[str, InputRequest] = {}
        """The inputs it is waiting for, by key."""
        self.scope = anyio.CancelScope()
        self.changed = anyio.Event()
        """Set when there is something to return: input requests, the result, an error, or that it takes long."""
        self.request_state = ""
        """The id under which it waits."""
        self.result: dict[str, Any] | None = None
        self.error: Exception | None = None
        self.progress: str | None = None
        """The latest progress, as text."""
        self.updated_at = datetime.now(UTC)
        self._input_responses = dict(input_responses)
        self._resumed = anyio.Event()

    async def run(self, handler: Handler, *, may_be_task: bool) -> None:
        """Runs the call to its end; the result or the error is stored."""
        context = self.context
        can_answer = context.answer_request is not None
        inner = Context(
            on_progress=self._report_progress if context.on_progress or may_be_task else None,
            on_log=self._send_notification if context.on_log else None,
            answer_request=self._ask if can_answer else None,
            answer_requests=self._request_inputs if can_answer else None,
            on_task=self._note_task if may_be_task else None,
            meta=context.meta,
            is_only_client=context.is_only_client,
        )
        with self.scope:
            try:
                self.result = await handler(inner)
            except Exception as error:  # boundary: raised again where the caller waits for it
                self.error = error
        if self.result is None and self.error is None:
            self.error = MCPError(INTERNAL_ERROR, "The call was cancelled.")
        self._change()

    def resume(self, input_responses: Mapping[str, Any], context: Context) -> None:
        """Continues with the client's answers; progress and log messages go to its new request from now on."""
        self.context = context
        self._input_responses.update(input_responses)
        self.input_requests = {}
        self.changed, self._resumed, resumed = anyio.Event(), anyio.Event(), self._resumed
        resumed.set()

    def detach(self) -> None:
        """Runs on without a request: there is nowhere to send notifications to."""
        self.context = replace(self.context, on_progress=None, on_log=None)

    def answer(self, input_responses: Mapping[str, Any]) -> None:
        """Takes some of the inputs that a task waits for; it continues when it has all. Unknown ones are ignored."""
        known = {key: value for key, value in input_responses.items() if key in self.input_requests}
        pending = {key: request for key, request in self.input_requests.items() if key not in known}
        if not known:
            return
        if pending:
            self._input_responses.update(known)
            self.input_requests = pending
        else:
            self.resume(known, self.context)
        self.updated_at = datetime.now(UTC)

    def _change(self) -> None:
        self.updated_at = datetime.now(UTC)
        self.changed.set()

    async def _request_inputs(self, input_requests: Mapping[str, InputRequest]) -> dict[str, Any]:
        """The answers to these input requests; missing ones are requested again each time the client returns."""
        for request in input_requests.values():
            require_capability(str(request.get("method")), self.context.meta)
        while missing := {key: request for key, request in input_requests.items() if key not in self._input_responses}:
            self.input_requests.update(missing)
            resumed = self._resumed
            self._change()
            with anyio.move_on_after(client_context.INPUT_TIMEOUT_S):
                await resumed.wait()
            if not resumed.is_set():
                raise RequestDeclined(f"no answer came within {client_context.INPUT_TIMEOUT_S:g} s")
        return {key: self._input_responses.pop(key) for key in input_requests}

    async def _ask(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        key = f"question-{secrets.token_hex(4)}"
        answers = await self._request_inputs({key: {"method": method, "params": dict(params)}})
        answer: Mapping[str, Any] = answers[key]
        return answer

    async def _report_progress(self, done: float, total: float | None, message: str | None) -> None:
        of_total = "" if total is None else f" of {total:g}"
        self.progress, self.updated_at = message or f"{done:g}{of_total}", datetime.now(UTC)
        if self.context.on_progress is not None:
            await self.context.on_progress(done, total, message)

    async def _send_notification(self, method: str, params: Mapping[str, Any]) -> None:
        if self.context.on_log is not None:
            await self.context.on_log(method, params)

    def _note_task(self) -> None:
        self.changed.set()


class ResumableCalls:
    """The calls that wait for inputs. The id of one cannot be guessed, and works once and only for the same request."""

    def __init__(self, runners: TaskGroup) -> None:
        self._runners = runners
        self._waiting: dict[str, ResumableCall] = {}
        self.tasks = CallTasks()

    async def start_or_resume(
        self, params: Mapping[str, Any], context: Context, handler: Handler, poller: str | None
    ) -> dict[str, Any]:
        """The handler's result, the input requests of a call that waits, or the task that a long call has become.

        `poller` is the client, if it can poll a task.
        """
        if "requestState" in params:
            call = self._resume(params, context)
        else:
            call = self._start(params, context)
            self._runners.start_soon(self._run, call, handler, poller is not None)
        try:
            task = await self._wait(call, poller)
        except BaseException:
            call.scope.cancel()
            raise
        if call.result is not None:
            return call.result
        if call.error is not None:
            raise call.error
        if task is not None:
            call.detach()
            return {**task.describe(), "resultType": "task"}
        state = secrets.token_urlsafe(24)
        self._waiting[state] = call
        call.request_state = state
        return {"resultType": "input_required", "inputRequests": call.input_requests, "requestState": state}

    async def _wait(self, call: ResumableCall, poller: str | None) -> CallTask | None:
        """Waits until there is something to return; a call that takes long becomes a task, if there may be one more."""
        timeout_s = math.inf if poller is None else TASK_AFTER_S
        while True:
            with anyio.move_on_after(timeout_s):
                await call.changed.wait()
            if call.result is not None or call.error is not None or call.input_requests:
                return None
            if poller is not None and (task := self.tasks.add(call, poller)) is not None:
                return task
            timeout_s, call.changed = math.inf, anyio.Event()

    def _start(self, params: Mapping[str, Any], context: Context) -> ResumableCall:
        if len(self._waiting) >= MAX_WAITING_CALLS:
            raise MCPError(INTERNAL_ERROR, f"{MAX_WAITING_CALLS} calls are waiting for input already; try again later")
        return ResumableCall(without_envelope(params), params.get("inputResponses") or {}, context)

    def _resume(self, params: Mapping[str, Any], context: Context) -> ResumableCall:
        call = self._waiting.pop(str(params["requestState"]), None)
        if call is None or call.request_params != without_envelope(params):
            raise MCPError(INVALID_PARAMS, "requestState belongs to another request, was already used, or has expired")
        call.resume(params.get("inputResponses") or {}, context)
        return call

    async def _run(self, call: ResumableCall, handler: Handler, may_be_task: bool) -> None:
        await call.run(handler, may_be_task=may_be_task)
        # It may end while it waits: at its own deadline, or when no answer comes.
        self._waiting.pop(call.request_state, None)


def without_envelope(params: Mapping[str, Any]) -> dict[str, Any]:
    """The params of a request without its `_meta` and the fields of a repeated request."""
    return {key: value for key, value in params.items() if key not in ("_meta", "inputResponses", "requestState")}
