"""The tasks extension of MCP 2026-07-28: a call that the server answers with a task is awaited by polling.

The call's deadline is the task's: a call that is cancelled, runs out of time, or has no answer to a question cancels
its task at the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
from mcp_types import INTERNAL_ERROR

from gateway.mcp_client.errors import UpstreamError
from gateway.mcp_client.server_requests import collect_inputs
from gateway.types import Context, Outcome

TASKS_EXTENSION = "io.modelcontextprotocol/tasks"
TASK_METHODS: Mapping[str, str] = dict.fromkeys(("tasks/get", "tasks/update", "tasks/cancel"), "taskId")
"""The methods on tasks, each with the parameter that is also sent as a header."""
DEFAULT_POLL_S, MIN_POLL_S, MAX_POLL_S = 1.0, 0.05, 10.0
CANCEL_S = 2.0
"""Deadline of telling the server that its task is no longer wanted."""

SendTaskRequest = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]


def declare_tasks(capabilities: Mapping[str, Any]) -> dict[str, Any]:
    """A client's capabilities with the tasks extension."""
    extensions = capabilities.get("extensions")
    known = extensions if isinstance(extensions, Mapping) else {}
    return {**capabilities, "extensions": {**known, TASKS_EXTENSION: {}}}


async def await_task(send: SendTaskRequest, task: dict[str, Any], context: Context) -> dict[str, Any]:
    """The result of the call that made the task; raises `UpstreamError` if the task fails or is lost."""
    task_id = task.get("taskId")
    if not isinstance(task_id, str):
        raise UpstreamError(Outcome.ERROR, "The tool's server answered with a task that has no id.")
    try:
        return await _poll(send, task_id, task, context)
    except UpstreamError as error:
        if error.outcome is not Outcome.UNAVAILABLE:
            raise
        # The server has begun: that a poll was not delivered does not make the call safe to repeat.
        raise UpstreamError(Outcome.UNKNOWN, f"its task was lost: {error.reason}", code=error.code) from error
    except BaseException:
        await _cancel(send, task_id)
        raise


async def _cancel(send: SendTaskRequest, task_id: str) -> None:
    with anyio.move_on_after(CANCEL_S, shield=True), suppress(UpstreamError):
        await send("tasks/cancel", {"taskId": task_id})


async def _poll(send: SendTaskRequest, task_id: str, task: dict[str, Any], context: Context) -> dict[str, Any]:
    answered: set[str] = set()
    steps, message = 0, None
    while True:
        if context.on_progress is not None and task.get("statusMessage") not in (None, message):
            steps, message = steps + 1, task["statusMessage"]
            await context.on_progress(steps, None, str(message))
        match task.get("status"):
            case "completed" if isinstance(result := task.get("result"), dict):
                return result
            case "failed":
                raise _task_error(task.get("error"))
            case "input_required":
                await _answer(send, task_id, task.get("inputRequests"), answered, context)
            case "working":
                pass
            case status:
                raise UpstreamError(Outcome.ERROR, f"The tool's task ended without a result ({status!s:.40}).")
        await anyio.sleep(_poll_interval(task.get("pollIntervalMs")))
        task = await send("tasks/get", {"taskId": task_id})


async def _answer(send: SendTaskRequest, task_id: str, requests: Any, answered: set[str], context: Context) -> None:
    """Answers the questions of a task that were not answered before."""
    new = (
        {key: request for key, request in requests.items() if key not in answered} if isinstance(requests, dict) else {}
    )
    if new:
        try:
            responses = await collect_inputs(new, context)
        except UpstreamError:
            await _cancel(send, task_id)
            raise
        await send("tasks/update", {"taskId": task_id, "inputResponses": responses})
        answered.update(new)


def _poll_interval(milliseconds: Any) -> float:
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
        return DEFAULT_POLL_S
    return min(max(milliseconds / 1000, MIN_POLL_S), MAX_POLL_S)


def _task_error(error: Any) -> UpstreamError:
    fields = error if isinstance(error, Mapping) else {}
    code = fields.get("code")
    reason = str(fields.get("message") or "The tool's task failed.")
    known_code = code if isinstance(code, int) else INTERNAL_ERROR
    return UpstreamError(Outcome.ERROR, reason, code=known_code, data=fields.get("data"), is_protocol_error=True)
