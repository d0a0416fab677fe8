"""Tools whose calls become tasks (an extension of MCP 2026-07-28), and the methods by which a client polls them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import anyio
import mcp_types as types
from everything.input_tools import STRING, get_answer, name_request, require_input
from everything.tools import Answer, Context, Tool, answer_with, elicitation_request, tool
from mcp import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

EXTENSION = "io.modelcontextprotocol/tasks"
TTL_MS, POLL_INTERVAL_MS = 600_000, 100
WORK_S = 0.5
CONFIRM = {"confirm": {"type": "boolean"}}


class TaskParams(types.RequestParams):
    task_id: str
    input_responses: dict[str, Any] = {}


@dataclass
class Task:
    """A call that runs until it ends, or waits for input."""

    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    created_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    fields: dict[str, Any] = field(default_factory=lambda: {"status": "working"})
    requests: dict[str, Any] = field(default_factory=dict)
    responses: dict[str, Any] = field(default_factory=dict)
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    runner: asyncio.Task[None] | None = None

    def describe(self) -> dict[str, Any]:
        times = {"createdAt": self.created_at, "lastUpdatedAt": datetime.now(UTC).isoformat()}
        return {"taskId": self.id, **times, "ttlMs": TTL_MS, "pollIntervalMs": POLL_INTERVAL_MS, **self.fields}

    async def ask(self, **requests: types.ElicitRequest) -> dict[str, Any]:
        """Waits for the answers to all requests."""
        self.requests = {key: request.model_dump(mode="json", by_alias=True) for key, request in requests.items()}
        self.fields = {"status": "input_required", "inputRequests": self.requests}
        await self.answered.wait()
        self.fields = {"status": "working"}
        return self.responses

    def update(self, responses: Mapping[str, Any]) -> None:
        known = {key: value for key, value in responses.items() if key in self.requests}
        self.responses.update(known)
        for key in known:
            del self.requests[key]
        if known and not self.requests:
            self.answered.set()


Work = Callable[[Task, Mapping[str, Any]], Awaitable[types.CallToolResult]]


class TaskTools:
    """The tools, and the tasks that their calls have become."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}

    def build_table(self) -> dict[str, Tool]:
        string, number = STRING, {"type": "number"}
        named = {"type": "object", "properties": {"name": string}, "required": ["name"]}
        optional = {"type": "object", "properties": {"seconds": number, "label": string}}
        return dict(
            (
                tool("greet", greet, named),
                self._tool("slow_compute", slow_compute, schema=optional),
                self._tool("failing_job", failing_job, is_task_needed=True),
                self._tool("protocol_error_job", protocol_error_job),
                self._tool("confirm_delete", confirm_delete, filename=string),
                self._tool("multi_input", multi_input),
                tool("test_tool_with_task", self._ask_then_work),
            )
        )

    def _tool(
        self,
        name: str,
        work: Work,
        schema: dict[str, Any] | None = None,
        *,
        is_task_needed: bool = False,
        **properties: Any,
    ) -> tuple[str, Tool]:
        async def run(ctx: Context, params: types.CallToolRequestParams) -> Any:
            arguments = params.arguments or {}
            if declares_tasks(ctx):
                return self._start(lambda task: work(task, arguments))
            if is_task_needed:
                raise missing_extension()
            return await work(Task(), arguments)

        run.__doc__ = work.__doc__
        return tool(name, run, schema, **properties)

    async def _ask_then_work(self, ctx: Context, params: types.CallToolRequestParams) -> Any:
        """Asks for a name, then works as a task."""
        answer = get_answer(params, "user_name")
        if not declares_tasks(ctx):
            raise missing_extension()
        if answer is None:
            return require_input(user_name=name_request())
        return self._start(lambda task: greet_later(task, answer))

    def _start(self, work: Callable[[Task], Awaitable[types.CallToolResult]]) -> dict[str, Any]:
        task = Task()
        self._tasks[task.id] = task
        task.runner = asyncio.create_task(_run(task, work))
        return {"resultType": "task", **task.describe()}

    async def get(self, ctx: Context, params: TaskParams) -> dict[str, Any]:
        return self._find(ctx, params).describe()

    async def update(self, ctx: Context, params: TaskParams) -> dict[str, Any]:
        self._find(ctx, params).update(params.input_responses)
        return {}

    async def cancel(self, ctx: Context, params: TaskParams) -> dict[str, Any]:
        task = self._find(ctx, params)
        if task.runner is not None and task.fields["status"] in ("working", "input_required"):
            task.runner.cancel()
            task.fields = {"status": "cancelled"}
        return {}

    def _find(self, ctx: Context, params: TaskParams) -> Task:
        if not declares_tasks(ctx):
            raise missing_extension()
        if params.task_id not in self._tasks:
            raise MCPError(types.INVALID_PARAMS, "There is no such task")
        return self._tasks[params.task_id]


async def _run(task: Task, work: Callable[[Task], Awaitable[types.CallToolResult]]) -> None:
    try:
        result = await work(task)
    except MCPError as error:
        task.fields = {"status": "failed", "error": {"code": error.error.code, "message": error.error.message}}
    else:
        task.fields = {"status": "completed", "result": result.model_dump(mode="json", by_alias=True)}


def declares_tasks(ctx: Context) -> bool:
    declared = ctx.session.client_capabilities
    is_known = declared is not None and EXTENSION in (declared.extensions or {})
    return is_known and ctx.protocol_version in MODERN_PROTOCOL_VERSIONS


def missing_extension() -> MCPError:
    needed = {"requiredCapabilities": {"extensions": {EXTENSION: {}}}}
    return MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, f"The client does not declare {EXTENSION}", needed)


async def greet(ctx: Context, params: types.CallToolRequestParams) -> Answer:
    """Greets, at once."""
    return answer_with(f"Hello, {(params.arguments or {}).get('name')}!")


async def slow_compute(task: Task, arguments: Mapping[str, Any]) -> types.CallToolResult:
    """Computes for some seconds."""
    await anyio.sleep(arguments.get("seconds", WORK_S))
    return answer_with(f"Computed {arguments.get('label', 'it')}.")


async def failing_job(task: Task, arguments: Mapping[str, Any]) -> types.CallToolResult:
    """Works for a while, then reports an error; its calls are always tasks."""
    await anyio.sleep(WORK_S)
    return answer_with("The job failed.", is_error=True)


async def protocol_error_job(task: Task, arguments: Mapping[str, Any]) -> types.CallToolResult:
    """Works for a while, then ends with a JSON-RPC error."""
    await anyio.sleep(WORK_S)
    raise MCPError(types.INTERNAL_ERROR, "The job broke down")


async def confirm_delete(task: Task, arguments: Mapping[str, Any]) -> types.CallToolResult:
    """Asks whether to delete a file."""
    answers = await task.ask(confirm=elicitation_request("Delete it?", **CONFIRM))
    return answer_with(f"Deleted: {answers['confirm']['action']}.")


async def multi_input(task: Task, arguments: Mapping[str, Any]) -> types.CallToolResult:
    """Asks two questions at once."""
    answers = await task.ask(
        first=elicitation_request("First?", **CONFIRM), second=elicitation_request("2?", **CONFIRM)
    )
    return answer_with(f"{len(answers)} answers.")


async def greet_later(task: Task, answer: Mapping[str, Any]) -> types.CallToolResult:
    await anyio.sleep(WORK_S)
    return answer_with(f"Hello, {answer.get('name')}!")
