"""Tests of calls that a server answers with a task, which is polled, with a real server."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from gateway.gateway import Gateway
from gateway.types import Context, Outcome, ToolCall, ToolResult
from tests.conftest import Write
from tests.waiting import PATIENCE_S, wait_until

SERVER = '''
import json
import os
import sys
from pathlib import Path

TASKS = "io.modelcontextprotocol/tasks"
NOW = "2026-01-01T00:00:00Z"
QUESTION = {"message": "Colour?", "mode": "form", "requestedSchema": {"type": "object", "properties": {}}}
polls, answers = {}, {}

def describe(kind):
    times = {"createdAt": NOW, "lastUpdatedAt": NOW, "ttlMs": 60000, "pollIntervalMs": 50}
    return {"taskId": kind, "status": "working", **times}

def get(kind):
    """A task works for two polls, and does what its kind says then."""
    polls[kind] += 1
    state = describe(kind)
    if kind == "dies":
        os._exit(3)
    if kind in ("failed", "cancelled"):
        return {**state, "status": kind, "error": {"code": -1, "message": "the disk is full"}}
    if kind == "endless" or polls[kind] < 3:
        return {**state, "statusMessage": f"step {polls[kind]}"}
    if kind == "asks" and kind not in answers:
        requests = {"q": {"method": "elicitation/create", "params": QUESTION}}
        return {**state, "status": "input_required", "inputRequests": requests}
    text = json.dumps(answers.pop(kind)) if kind in answers else f"done after {polls[kind]} polls"
    return {**state, "status": "completed", "result": {"content": [{"type": "text", "text": text}]}}

def answer(method, params):
    match method:
        case "server/discover":
            return {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}, "extensions": {TASKS: {}}}}
        case "tools/list":
            return {"tools": [{"name": "work", "inputSchema": {"type": "object"}}]}
        case "tools/call" if TASKS in str(params["_meta"]):
            polls[params["arguments"]["kind"]] = 0
            return {"resultType": "task", **describe(params["arguments"]["kind"])}
        case "tasks/get":
            return get(params["taskId"])
        case "tasks/update":
            answers[params["taskId"]] = params["inputResponses"]
            return {}
        case "tasks/cancel":
            Path(sys.argv[1]).write_text(params["taskId"])
            return {}

for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params", {}))
        ended = {"error": {"code": -32601, "message": "none"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **ended}), flush=True)
'''


@asynccontextmanager
async def _open(write: Write, timeout_s: float = 30) -> AsyncIterator[tuple[Any, Path]]:
    script = write("slow_server.py", SERVER)
    cancelled = script.with_name("cancelled")
    server = {"command": sys.executable, "args": [str(script), str(cancelled)], "timeout_s": timeout_s}
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


async def test_task_without_a_result_is_an_error_and_unknown_where_its_server_dies(write: Write) -> None:
    async with _open(write) as (session, _):
        for kind, words in (("failed", "the disk is full"), ("cancelled", "ended without a result")):
            result = await _call(session, kind)
            assert result.outcome is Outcome.ERROR and words in result.text
        assert (await _call(session, "dies")).outcome is Outcome.UNKNOWN
