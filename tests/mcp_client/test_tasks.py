"""Tests of calls that a server answers with a task, which is polled, with a real server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from gateway.gateway import Gateway
from gateway.types import Context, Outcome, ToolCall, ToolResult
from tests.conftest import Write
from tests.servers.forked_server import forked_command
from tests.waiting import PATIENCE_S, wait_until

SERVER = '''
import json
import os
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.extension import Extension, MethodBinding
from mcp_types import RequestParams

TASKS = "io.modelcontextprotocol/tasks"
NOW = "2026-01-01T00:00:00Z"


class TaskParams(RequestParams):
    task_id: str
    input_responses: dict | None = None


class Tasks(Extension):
    """Answers each call with a task that ends after some polls, as its `kind` says."""

    identifier = TASKS

    def __init__(self):
        self.tasks = {}
        self.cancelled = Path(sys.argv[1])

    async def intercept_tool_call(self, params, ctx, call_next):
        declared = (ctx.meta or {}).get("io.modelcontextprotocol/clientCapabilities") or {}
        if TASKS not in (declared.get("extensions") or {}):
            return await call_next(ctx)
        kind = params.arguments["kind"]
        self.tasks[kind] = {"kind": kind, "polls": 0, "answer": None}
        return {"resultType": "task", **self.state(kind)}

    def state(self, task_id):
        times = {"createdAt": NOW, "lastUpdatedAt": NOW, "ttlMs": 60000, "pollIntervalMs": 50}
        return {"taskId": task_id, "status": "working", **times}

    async def get(self, ctx, params):
        task = self.tasks[params.task_id]
        task["polls"] += 1
        state = self.state(params.task_id)
        if task["kind"] == "dies":
            os._exit(3)
        if task["kind"] == "endless" or task["polls"] < 3:
            return {**state, "statusMessage": f"step {task['polls']}"}
        if task["kind"] == "asks" and task["answer"] is None:
            params = {"message": "Colour?", "mode": "form", "requestedSchema": {"type": "object", "properties": {}}}
            requests = {"q": {"method": "elicitation/create", "params": params}}
            return {**state, "status": "input_required", "inputRequests": requests}
        text = json.dumps(task["answer"]) if task["answer"] else f"done after {task['polls']} polls"
        return {**state, "status": "completed", "result": {"content": [{"type": "text", "text": text}]}}

    async def update(self, ctx, params):
        self.tasks[params.task_id]["answer"] = params.input_responses
        return {}

    async def cancel(self, ctx, params):
        self.cancelled.write_text(params.task_id)
        return {}

    def methods(self):
        handlers = {"tasks/get": self.get, "tasks/update": self.update, "tasks/cancel": self.cancel}
        return [MethodBinding(name, TaskParams, handler) for name, handler in handlers.items()]


server = MCPServer("slow", extensions=[Tasks()])

@server.tool()
def work(kind: str) -> str:
    return "done at once"

server.run("stdio")
'''


@asynccontextmanager
async def _open(write: Write, timeout_s: float = 30) -> AsyncIterator[tuple[Any, Path]]:
    script = write("slow_server.py", SERVER)
    cancelled = script.with_name("cancelled")
    command, args = forked_command(script, str(cancelled))
    server = {"command": command, "args": args, "timeout_s": timeout_s}
    file = write("servers.json", json.dumps({"mcpServers": {"slow": server}}))
    with anyio.fail_after(60):
        async with Gateway.load(None, file) as gateway, gateway.open() as session:
            yield session, cancelled


async def _call(session: Any, kind: str, **context: Any) -> ToolResult:
    result: ToolResult = await session.call(ToolCall("1", "work", json.dumps({"kind": kind})), Context(**context))
    return result


def has_text(file: Path, text: str) -> bool:
    return file.exists() and file.read_text() == text


async def test_task_is_polled_to_its_result_with_progress(write: Write) -> None:
    heard: list[tuple[float, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message))

    async with _open(write) as (session, cancelled):
        result = await _call(session, "works", on_progress=on_progress)
    assert (result.outcome, result.text) == (Outcome.OK, "done after 3 polls")
    assert heard == [(1, "step 1"), (2, "step 2")]
    assert not cancelled.exists()


async def test_question_of_a_task_is_answered_by_the_caller_or_ends_the_task(write: Write) -> None:
    async def answer(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"action": "accept", "content": {"colour": params["message"]}}

    async with _open(write) as (session, cancelled):
        result = await _call(session, "asks", answer_request=answer)
        assert not cancelled.exists()
        refused = await _call(session, "asks")
        await wait_until(lambda: has_text(cancelled, "asks"))
    assert json.loads(result.text) == {"q": {"action": "accept", "content": {"colour": "Colour?"}}}
    assert refused.outcome is Outcome.ERROR
    assert "needs input that its caller cannot give" in refused.text


async def test_task_is_cancelled_at_the_calls_deadline(write: Write) -> None:
    for timeout_s in (3.0, PATIENCE_S / 2):  # A machine that is busy may not even begin the task in time.
        begun = anyio.Event()

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            begun.set()  # noqa: B023 - of the call that is under way

        async with _open(write, timeout_s=timeout_s) as (session, cancelled):
            result = await _call(session, "endless", on_progress=on_progress)
            assert result.outcome is Outcome.TIMEOUT
            if begun.is_set():
                await wait_until(lambda: has_text(cancelled, "endless"))
                return
    raise AssertionError("no task began in time")


async def test_task_of_a_server_that_dies_ends_as_unknown(write: Write) -> None:
    async with _open(write) as (session, _):
        result = await _call(session, "dies")
    assert result.outcome is Outcome.UNKNOWN
