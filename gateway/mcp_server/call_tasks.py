"""The tasks extension of MCP 2026-07-28, for clients of the gateway: a long tool call is polled instead of awaited.

The server decides which call becomes a task. A task is known by an id that cannot be guessed, and there is no list of
them, so a client reaches only its own. It ends with its call, when it is cancelled, or with its time to live.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
from mcp.server.runner import modern_error_data
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    RequestParams,
)
from mcp_types.methods import serialize_server_result
from mcp_types.version import LATEST_MODERN_VERSION

from gateway.mcp_client.tasks import TASKS_EXTENSION
from gateway.mcp_server.client_context import RequestContext, is_modern

if TYPE_CHECKING:
    from gateway.mcp_server.resumable_calls import ResumableCall

TTL_S = 3600.0
"""How long a task exists from its creation on: a call that still runs then is cancelled."""
POLL_INTERVAL_MS = 500
MAX_TASKS, MAX_CLIENT_TASKS = 1024, 256
"""Limits on tasks in all and of one client (by its address); a call beyond them is answered when it ends.

A task whose end its client knows makes room for a new one; any other is kept for the time that its client was told.
"""


class TaskParams(RequestParams):
    """The params of `tasks/get` and `tasks/cancel`."""

    task_id: str


class UpdateTaskParams(TaskParams):
    """The params of `tasks/update`."""

    input_responses: dict[str, Any]


class CallTask:
    """A tool call that its client polls."""

    def __init__(self, call: ResumableCall, client: str) -> None:
        self.id = secrets.token_urlsafe(24)
        self.call, self.client = call, client
        self.created_at = datetime.now(UTC)
        self.expires_at = anyio.current_time() + TTL_S
        call.scope.deadline = self.expires_at
        self._is_cancelled = False
        self.is_done = False
        """Whether the task has ended and its client was told so."""

    @property
    def status(self) -> str:
        if self._is_cancelled:
            return "cancelled"
        if self.call.result is not None or self.call.error is not None:
            return "failed" if self.call.result is None else "completed"
        return "input_required" if self.call.input_requests else "working"

    def cancel(self) -> None:
        """Cancels the call, unless it has ended."""
        if self.status in ("working", "input_required"):
            self._is_cancelled = self.is_done = True
            self.call.scope.cancel()

    def describe(self) -> dict[str, Any]:
        """The fields that every answer about the task has."""
        described = {
            "taskId": self.id,
            "status": self.status,
            "createdAt": _format_time(self.created_at),
            "lastUpdatedAt": _format_time(max(self.call.updated_at, self.created_at)),
            "ttlMs": int(TTL_S * 1000),
            "pollIntervalMs": POLL_INTERVAL_MS,
        }
        return described if self.call.progress is None else {**described, "statusMessage": self.call.progress}

    def describe_fully(self) -> dict[str, Any]:
        """The answer to a poll, with the result, the error or the questions."""
        state = {"resultType": "complete", **self.describe()}
        match self.status:
            case "completed":
                state["result"] = serialize_server_result("tools/call", LATEST_MODERN_VERSION, self.call.result or {})
            case "failed" if self.call.error is not None:
                error = modern_error_data(self.call.error)
                state["error"] = error.model_dump(mode="json", by_alias=True, exclude_none=True)
            case "input_required":
                state["inputRequests"] = self.call.input_requests
        return state


def _format_time(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class CallTasks:
    """The tasks of all clients, in the order in which they expire."""

    def __init__(self) -> None:
        self._by_id: dict[str, CallTask] = {}
        self._by_client: Counter[str] = Counter()

    def add(self, call: ResumableCall, client: str) -> CallTask | None:
        """A new task for the call; None if there are too many."""
        self._drop_expired()
        if not self._make_room(client):
            return None
        task = CallTask(call, client)
        self._by_id[task.id] = task
        self._by_client[client] += 1
        return task

    def find(self, task_id: str) -> CallTask:
        """The task with this id; raises a JSON-RPC error if there is none (any more)."""
        self._drop_expired()
        task = self._by_id.get(task_id)
        if task is None:
            raise MCPError(INVALID_PARAMS, "taskId names no task; it may have expired")
        return task

    def _make_room(self, client: str) -> bool:
        """Whether the client may have one more task; at a limit, the oldest one that is done is dropped for it."""
        is_client_full = self._by_client[client] >= MAX_CLIENT_TASKS
        if not is_client_full and len(self._by_id) < MAX_TASKS:
            return True
        candidates = (task for task in self._by_id.values() if task.client == client or not is_client_full)
        done = next((task for task in candidates if task.is_done), None)
        if done is not None:
            self._drop(done)
        return done is not None

    def _drop_expired(self) -> None:
        now = anyio.current_time()
        while self._by_id and (task := next(iter(self._by_id.values()))).expires_at <= now:
            self._drop(task)

    def _drop(self, task: CallTask) -> None:
        del self._by_id[task.id]
        self._by_client[task.client] -= 1
        if not self._by_client[task.client]:
            del self._by_client[task.client]


def has_tasks(meta: Mapping[str, Any]) -> bool:
    """Whether a request's `_meta` says that its client knows tasks."""
    capabilities = meta.get(CLIENT_CAPABILITIES_META_KEY)
    extensions = capabilities.get("extensions") if isinstance(capabilities, Mapping) else None
    return isinstance(extensions, Mapping) and TASKS_EXTENSION in extensions


def name_client(request: RequestContext) -> str:
    """The address of the client behind a request; empty over stdio."""
    client = getattr(request.request, "client", None)
    return str(client.host) if client is not None else ""


async def get_task(request: RequestContext, params: TaskParams) -> dict[str, Any]:
    """Answers `tasks/get`."""
    task = _find_task(request, params)
    answer = task.describe_fully()
    task.is_done = answer["status"] in ("completed", "failed", "cancelled")
    return answer


async def update_task(request: RequestContext, params: UpdateTaskParams) -> dict[str, Any]:
    """Answers `tasks/update`: the client's answers to the questions of a task."""
    task = _find_task(request, params)
    if task.status == "input_required":
        task.call.answer(params.input_responses)
    return {}


async def cancel_task(request: RequestContext, params: TaskParams) -> dict[str, Any]:
    """Answers `tasks/cancel`; a task that has ended stays as it is."""
    _find_task(request, params).cancel()
    return {}


def _find_task(request: RequestContext, params: TaskParams) -> CallTask:
    if not is_modern(request):
        raise MCPError(METHOD_NOT_FOUND, f"Method not found: {request.method}")
    headers = getattr(request.request, "headers", None)
    if headers is not None and decode_header_value(headers.get(MCP_NAME_HEADER)) != params.task_id:
        raise MCPError(
            HEADER_MISMATCH, f"{MCP_NAME_HEADER} header does not match the request body's 'taskId' parameter"
        )
    if not has_tasks((request.params or {}).get("_meta") or {}):
        needed: dict[str, Any] = {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}}
        message = f"{request.method} needs a client that declares the extension {TASKS_EXTENSION}"
        raise MCPError(MISSING_REQUIRED_CLIENT_CAPABILITY, message, needed)
    tasks: CallTasks = request.lifespan_context.resumable_calls.tasks
    return tasks.find(params.task_id)
