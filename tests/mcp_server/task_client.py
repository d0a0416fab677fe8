"""An MCP client that polls tasks, as raw JSON-RPC over HTTP or over the pipes of a process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.servers.start_server import kill_process_group

VERSION, PREFIX, TASKS = "2026-07-28", "io.modelcontextprotocol/", "io.modelcontextprotocol/tasks"
TIMEOUT_S, MAX_LINE = 30, 1_000_000
Send = Callable[[dict[str, Any], dict[str, str]], Awaitable[dict[str, Any]]]


class TaskClient:
    """Sends requests; by default it declares that it knows tasks and can answer elicitations."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._ids = 0

    async def request(
        self, method: str, params: dict[str, Any], *, tasks: bool = True, meta: Any = None, **headers: str
    ) -> dict[str, Any]:
        """The answer, with its `result` or its `error`."""
        capabilities = {"elicitation": {}, "extensions": {TASKS: {}}} if tasks else {}
        envelope = {
            f"{PREFIX}protocolVersion": VERSION,
            f"{PREFIX}clientInfo": {"name": "test", "version": "1"},
            f"{PREFIX}clientCapabilities": capabilities,
            **(meta or {}),
        }
        self._ids += 1
        request = {"jsonrpc": "2.0", "id": self._ids, "method": method, "params": {**params, "_meta": envelope}}
        name = params.get("taskId") or params.get("name")
        named = {} if name is None else {"mcp-name": name}
        with anyio.fail_after(TIMEOUT_S):
            return await self._send(request, {"mcp-method": method, **named, **headers})

    async def call(self, name: str, arguments: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """The result of a tool call, or the task that it became."""
        result: dict[str, Any] = (
            await self.request("tools/call", {"name": name, "arguments": arguments or {}}, **more)
        )["result"]
        return result

    async def on_task(self, verb: str, task_id: str, **params: Any) -> dict[str, Any]:
        """The result of a `tasks/` method."""
        result: dict[str, Any] = (await self.request(f"tasks/{verb}", {"taskId": task_id, **params}))["result"]
        return result

    async def poll(self, task_id: str, *statuses: str) -> dict[str, Any]:
        """Polls a task until it has one of these statuses."""
        with anyio.fail_after(TIMEOUT_S):
            while (task := await self.on_task("get", task_id))["status"] not in statuses:  # noqa: ASYNC110 - the protocol has no other way
                await anyio.sleep(0.02)
        return task


@asynccontextmanager
async def connect_over_http(url: str) -> AsyncIterator[TaskClient]:
    """A client of a server at an address."""
    accept = {"accept": "application/json, text/event-stream", "mcp-protocol-version": VERSION}
    async with httpx2.AsyncClient(timeout=TIMEOUT_S) as http:

        async def send(request: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
            response = await http.post(url, json=request, headers=accept | headers)
            events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            answer: dict[str, Any] = json.loads(events[-1] if events else response.text)
            return answer

        yield TaskClient(send)


@asynccontextmanager
async def connect_over_stdio(command: Sequence[str]) -> AsyncIterator[TaskClient]:
    """A client that starts its server."""
    process = await anyio.open_process(command, stderr=None, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None
    stdin, lines = process.stdin, BufferedByteReceiveStream(process.stdout)

    async def send(request: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
        await stdin.send(json.dumps(request).encode() + b"\n")
        while True:
            answer: dict[str, Any] = json.loads(await lines.receive_until(b"\n", MAX_LINE))
            if answer.get("id") == request["id"]:
                return answer

    try:
        yield TaskClient(send)
    finally:
        with anyio.CancelScope(shield=True):
            await kill_process_group(process)
