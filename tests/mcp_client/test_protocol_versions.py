"""Modern and handshake protocol versions: server requests reach the caller of the tool, or nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.config.models import Server
from gateway.errors import RequestDeclined
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.types import Context
from tests.mcp_client.mcp_toolsets import TRANSPORTS, call_tool, misbehaving_toolset, open_toolset
from tests.servers.forked_server import forked_command
from tests.servers.start_server import free_port, kill_process_group
from tests.waiting import PATIENCE_S, wait_until

EVERYTHING_SERVER = str(Path(__file__).parents[2] / "bench/conformance/everything_server.py")
modern_transports = pytest.mark.parametrize("transport", ["stdio", "http"])
all_transports = pytest.mark.parametrize("transport", TRANSPORTS)


@asynccontextmanager
async def serve_everything(port: int) -> AsyncIterator[str]:
    command, args = forked_command(EVERYTHING_SERVER, "--port", str(port))
    process = await anyio.open_process([command, *args], start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        with anyio.fail_after(PATIENCE_S, shield=True), suppress(anyio.EndOfStream):
            while process.stdout is not None:  # Until the fork has ended, too, and its port is free.
                await process.stdout.receive()
        await kill_process_group(process)


@asynccontextmanager
async def everything_toolset(transport: str, **config: Any) -> AsyncIterator[McpToolset]:
    """A server built with the SDK, which offers every feature of the modern protocol."""
    with anyio.fail_after(60):
        if transport == "stdio":
            command, args = forked_command(EVERYTHING_SERVER)
            async with open_toolset(Server(command=command, args=tuple(args), **config)) as server:
                yield server
            return
        async with serve_everything(free_port()) as url, open_toolset(Server(url=url, **config)) as server:
            await wait_until(lambda: server.status.state == "up", within_s=30)
            yield server


async def answer_request(method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    if method == "elicitation/create":
        return {"action": "accept", "content": {"username": "ada", "email": "ada@example.org"}}
    return {"role": "assistant", "content": {"type": "text", "text": "forty-two"}, "model": "m"}


async def decline_request(method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
    raise RequestDeclined("nobody is at the desk")


@modern_transports
async def test_modern_server_change_notifications_arrive(transport: str) -> None:
    methods: list[str] = []
    async with everything_toolset(transport) as server:
        server.on_notification.append(lambda method, params: methods.append(method))

        async def change_until_heard() -> None:
            while "notifications/tools/list_changed" not in methods:
                await call_tool(server, "test_trigger_tool_change")
                await anyio.sleep(0.05)

        with anyio.fail_after(PATIENCE_S):
            await change_until_heard()


async def test_listing_is_reloaded_after_a_lost_subscription() -> None:
    methods: list[str] = []
    port = free_port()
    with anyio.fail_after(60):
        first, second = serve_everything(port), serve_everything(port)
        url = await first.__aenter__()
        async with open_toolset(Server(url=url)) as server:
            await wait_until(lambda: server.status.state == "up", within_s=30)
            server.on_notification.append(lambda method, params: methods.append(method))
            await first.__aexit__(None, None, None)
            async with second:
                await wait_until(lambda: "notifications/tools/list_changed" in methods, within_s=30)
                assert server.status.reconnects == 0


@all_transports
async def test_handshake_server_request_is_answered_by_the_caller(transport: str) -> None:
    async with misbehaving_toolset(transport) as server:
        answer = await call_tool(server, "ask", Context(answer_request=answer_request), method="sampling/createMessage")
        assert "forty-two" in answer.text
        unanswered = await call_tool(server, "ask", method="sampling/createMessage")
        assert "the caller of this tool cannot answer" in unanswered.text
        declined = await call_tool(server, "ask", Context(answer_request=decline_request), method="elicitation/create")
        assert "nobody is at the desk" in declined.text
        assert (await call_tool(server, "ask", method="ping")).text == "{}"
        assert "Method not found" in (await call_tool(server, "ask", method="tasks/none")).text


@all_transports
async def test_ambiguous_server_request_is_answered_by_no_caller(transport: str) -> None:
    async with misbehaving_toolset(transport) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: call_tool(server, "hang", Context(answer_request=decline_request)))
        await wait_until(lambda: any(connection.pending for connection in server.pool.connections))
        answer = await call_tool(server, "ask", Context(answer_request=answer_request), method="elicitation/create")
        if transport == "http":
            assert "ada" in answer.text, "over HTTP, the stream of a server request shows which call it belongs to"
        else:
            assert "isolation: session" in answer.text
        tasks.cancel_scope.cancel()
