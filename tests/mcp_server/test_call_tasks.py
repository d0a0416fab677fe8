"""Long tool calls become tasks that MCP clients poll, answer and cancel, over HTTP and stdio."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest

from gateway.gateway import Gateway
from gateway.mcp_server import call_tasks, resumable_calls
from gateway.types import Context, Outcome, ToolCall
from tests.conftest import Write
from tests.http.api_client import HangingTool
from tests.live_server import live_server_async
from tests.mcp_server.clients import native_source, serve_gateway
from tests.mcp_server.task_client import TASKS, TaskClient, connect_over_http, connect_over_stdio
from tests.servers.forked_server import forked_command
from tests.waiting import wait_until

EVERYTHING_SERVER = Path(__file__).parents[2] / "bench/conformance/everything_server.py"
YES = {"action": "accept", "content": {"confirm": True}}
each_transport = pytest.mark.parametrize("transport", ["http", "stdio"])


def servers_file(write: Write, **server: Any) -> Path:
    command, args = forked_command(EVERYTHING_SERVER)
    upstream = server or {"command": command, "args": args}
    return write("servers.json", json.dumps({"mcpServers": {"everything": upstream}}))


@asynccontextmanager
async def connect(write: Write, transport: str) -> AsyncIterator[TaskClient]:
    """A client of a gateway whose only server makes tasks of its calls."""
    file = servers_file(write)
    async with AsyncExitStack() as stack:
        if transport == "stdio":
            (file.parent / "no_tools").mkdir()
            options = ["--wait", "all", "--tools", str(file.parent / "no_tools"), "--mcp", str(file)]
            command, args = forked_command("-m", "gateway.cli", "stdio", *options)
            connecting = connect_over_stdio([command, *args])
        else:
            server = await stack.enter_async_context(live_server_async(lambda: Gateway.load(None, file)))
            connecting = connect_over_http(f"{server.url}/mcp")
        yield await stack.enter_async_context(connecting)


@asynccontextmanager
async def connect_to_hanging(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[TaskClient, HangingTool]]:
    """A client of a gateway with a hanging tool, whose calls become tasks soon."""
    monkeypatch.setattr(resumable_calls, "TASK_AFTER_S", 0.05)
    tool = HangingTool()
    async with serve_gateway(lambda: [native_source(tool.hang)]) as (url, _), connect_over_http(url) as client:
        yield client, tool


@each_transport
async def test_task_is_polled_to_its_result(write: Write, transport: str) -> None:
    async with connect(write, transport) as client:
        discovered = await client.request("server/discover", {})
        assert discovered["result"]["capabilities"]["extensions"] == {TASKS: {}}
        task = await client.call("slow_compute", {"seconds": 0.2, "label": "pi"})
        assert (task["resultType"], task["status"], task["ttlMs"]) == ("task", "working", 3_600_000)
        done = await client.poll(task["taskId"], "completed")
        assert done["result"]["content"] == [{"type": "text", "text": "Computed pi."}]
        assert not done["result"]["isError"] and done["resultType"] == "complete"
        assert await client.on_task("cancel", task["taskId"])
        assert (await client.on_task("get", task["taskId"]))["status"] == "completed"


async def test_error_of_a_tool_is_a_result_and_that_of_the_protocol_fails_the_task(write: Write) -> None:
    async with connect(write, "http") as client:
        failing, breaking = [(await client.call(name))["taskId"] for name in ("failing_job", "protocol_error_job")]
        assert (await client.poll(failing, "completed"))["result"]["isError"]
        failed = (await client.poll(breaking, "failed"))["error"]
        assert failed == {"code": types.INTERNAL_ERROR, "message": "The job broke down"}


async def test_questions_of_a_task_are_answered_one_by_one(write: Write) -> None:
    async with connect(write, "http") as client:
        task_id = (await client.call("multi_input"))["taskId"]
        asking = await client.poll(task_id, "input_required")
        requests = {key: request["method"] for key, request in asking["inputRequests"].items()}
        assert requests == dict.fromkeys(("first", "second"), "elicitation/create")
        await client.on_task("update", task_id, inputResponses={"first": YES, "unknown": YES})
        assert (await client.on_task("get", task_id))["inputRequests"].keys() == {"second"}
        await client.on_task("update", task_id, inputResponses={"second": YES})
        assert (await client.poll(task_id, "completed"))["result"]["content"][0]["text"] == "2 answers."


async def test_unknown_tasks_methods_and_wrong_headers_are_refused(write: Write) -> None:
    async with connect(write, "http") as client:
        refused = [
            await client.request("tasks/get", {"taskId": "unknown"}),
            await client.request("tasks/get", {"taskId": "unknown"}, **{"mcp-name": "other"}),
            await client.request("tasks/list", {}),
            await client.request("tasks/get", {"taskId": "unknown"}, tasks=False),
        ]
        unaware = await client.call("slow_compute", {"seconds": 0.1, "label": "pi"}, tasks=False)
        assert unaware["content"][0]["text"] == "Computed pi.", "its client knows no tasks"
    codes = [types.INVALID_PARAMS, types.HEADER_MISMATCH, types.METHOD_NOT_FOUND]
    codes += [types.MISSING_REQUIRED_CLIENT_CAPABILITY]
    assert [answer["error"]["code"] for answer in refused] == codes


async def test_cancelling_a_task_cancels_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect_to_hanging(monkeypatch) as (client, tool):
        task = await client.call("hang")
        assert task["resultType"] == "task" and not tool.cancelled.is_set()
        await client.on_task("cancel", task["taskId"])
        await wait_until(tool.cancelled.is_set)
        cancelled = await client.on_task("get", task["taskId"])
        assert cancelled["status"] == "cancelled" and not cancelled.keys() & {"result", "error", "inputRequests"}


async def test_task_ends_and_is_forgotten_at_its_time_to_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_tasks, "TTL_S", 0.3)
    async with connect_to_hanging(monkeypatch) as (client, tool):
        task = await client.call("hang")
        assert task["ttlMs"] == 300
        await wait_until(tool.cancelled.is_set)
        refused = await client.request("tasks/get", {"taskId": task["taskId"]})
        assert refused["error"]["code"] == types.INVALID_PARAMS


@pytest.mark.parametrize("limit", ["MAX_TASKS", "MAX_CLIENT_TASKS"])
async def test_call_beyond_the_limit_of_tasks_is_answered_when_it_ends(
    limit: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_tasks, limit, 1)
    async with connect(write, "http") as client:
        first = await client.call("slow_compute", {"seconds": 60})
        second = await client.call("slow_compute", {"seconds": 0.1, "label": "pi"})
        assert (first["resultType"], second["resultType"]) == ("task", "complete")
        assert second["content"][0]["text"] == "Computed pi."
        await client.on_task("cancel", first["taskId"])
        assert (await client.call("slow_compute", {"seconds": 60}))["resultType"] == "task"


async def test_gateway_polls_the_tasks_of_another_gateway(write: Write) -> None:
    heard: list[str | None] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    file = servers_file(write)
    async with live_server_async(lambda: Gateway.load(None, file)) as server:
        chained = servers_file(write, url=f"{server.url}/mcp")
        async with Gateway.load(None, chained) as gateway, gateway.open() as session:
            arguments = json.dumps({"seconds": 0.1, "label": "pi"})
            result = await session.call(ToolCall("1", "slow_compute", arguments), Context(on_progress=on_progress))
    assert (result.outcome, result.text) == (Outcome.OK, "Computed pi.")
