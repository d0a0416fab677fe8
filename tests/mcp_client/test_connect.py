"""Connecting: a server that cannot be reached has one clear reason within its deadline, and stops nothing else."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import psutil
import pytest

from gateway.config.models import Server
from gateway.mcp_client.dispatcher import Dispatcher
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.types import Outcome
from tests.mcp_client.mcp_toolsets import TRANSPORTS, call_tool, misbehaving_toolset, open_toolset
from tests.servers.start_server import free_port, serve_misbehaving, stdio_command
from tests.waiting import PATIENCE_S, loop_clock, wait_until

all_transports = pytest.mark.parametrize("transport", TRANSPORTS)


@all_transports
async def test_silent_server_is_down_after_the_connect_timeout(transport: str) -> None:
    async with loop_clock() as clock, misbehaving_toolset(transport, "--never-answer", connect_timeout_s=1.5) as server:
        assert server.status.state == "down" and server.status.remedy
        assert "no answer within 1.5 s" in server.status.reason
        assert server.specs == ()
        assert clock.now_s < 15


async def test_no_child_is_left_if_entering_is_cancelled() -> None:
    command, args = stdio_command("--never-answer")
    config = Server(command=command, args=tuple(args), connect_timeout_s=20)
    async with Services() as services:
        server = McpToolset("it", config, services=services)
        with anyio.move_on_after(0.5) as scope:
            await server.__aenter__()
        assert scope.cancelled_caught
        running = [child.cmdline() for child in psutil.Process().children(recursive=True)]
        assert not [line for line in running if "--never-answer" in line]


async def test_child_process_limit_holds_for_all_servers_together() -> None:
    command, args = stdio_command()
    config = Server(command=command, args=tuple(args))
    hasty = config.model_copy(update={"connect_timeout_s": 1})
    async with (
        Services(max_children=1) as services,
        McpToolset("one", config, services=services) as first,
        McpToolset("two", hasty, services=services) as second,
    ):
        await wait_until(lambda: second.status.state == "down")
        assert first.status.state == "up"
        assert "no slot for another child process" in second.status.reason


async def test_server_that_is_not_there_yet_is_not_taken_for_one_of_an_older_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it started between the two, the handshake would be agreed on, and the modern version never asked for."""
    asked: list[str] = []
    send = Dispatcher.send_raw_request

    async def record(self: Dispatcher, method: str, *args: Any) -> dict[str, Any]:
        asked.append(method)
        return await send(self, method, *args)

    monkeypatch.setattr(Dispatcher, "send_raw_request", record)
    async with open_toolset(Server(url=f"http://127.0.0.1:{free_port()}/mcp", transport="streamable_http")) as server:
        assert server.status.state == "down"
    assert {*asked} == {"server/discover"}


async def test_exited_process_is_reported_with_code_and_stderr() -> None:
    code = "import sys; sys.stderr.write('no API key given'); sys.exit(9)"
    async with open_toolset(Server(command=sys.executable, args=("-c", code))) as server:
        assert server.status.state == "down"
        assert "exited with 9" in server.status.reason and "no API key given" in server.status.reason


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_token_is_sent_but_never_shown_and_named_where_it_is_missing(transport: str) -> None:
    async with misbehaving_toolset(transport, "--require-token", "s3cret", auth_token="s3cret") as server:
        assert (await call_tool(server, "echo", text="let in")).text == "let in"
        assert "s3cret" not in repr(server.status) + repr(server.config)
    async with misbehaving_toolset(transport, "--require-token", "s3cret") as server:
        assert server.status.state == "down" and "HTTP 401" in server.status.reason
        assert "auth_token" in server.status.remedy


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_transport_of_a_bare_url_is_detected(transport: str) -> None:
    async with serve_misbehaving(transport) as url, open_toolset(Server(url=url)) as server:  # type: ignore[arg-type]
        assert server.status.transport == {"sse": "sse", "http": "streamable-http"}[transport]
        assert (await call_tool(server, "echo", text="found")).text == "found"
        async with open_toolset(Server(url=f"{url}/none")) as other:
            assert "as streamable-http" in other.status.reason and "as sse" in other.status.reason


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_server_that_stops_and_returns_is_reconnected(transport: Any) -> None:
    serve = partial(serve_misbehaving, transport, "--listen-port", str(free_port()))
    with anyio.fail_after(60):
        async with (
            AsyncExitStack() as first,
            open_toolset(Server(url=await first.enter_async_context(serve()))) as server,
        ):
            specs = server.specs
            await first.aclose()
            await call_until_unavailable(server)
            assert server.specs is specs
            await wait_until(lambda: server.status.state == "stale")
            assert "cannot connect" in server.status.reason
            async with serve():
                await wait_until(lambda: server.status.state == "up", within_s=40)
                assert (await call_tool(server, "echo", text="back")).text == "back"
                assert server.specs is specs and server.status.reconnects >= 1


async def call_until_unavailable(server: McpToolset) -> None:
    """Calls until a call is unavailable: the death of a server that we did not start shows only in the next call."""
    with anyio.fail_after(PATIENCE_S):
        while (await call_tool(server, "echo", text="x")).outcome is not Outcome.UNAVAILABLE:  # noqa: ASYNC110 (no event)
            await anyio.sleep(0.02)


async def test_session_forgotten_by_the_server_is_reopened() -> None:
    serve = partial(serve_misbehaving, "http", "--listen-port", str(free_port()))
    with anyio.fail_after(60):
        async with (
            AsyncExitStack() as first,
            open_toolset(Server(url=await first.enter_async_context(serve()))) as server,
        ):
            await first.aclose()
            async with serve():
                lost = await call_tool(server, "echo", text="x")
                assert lost.outcome in (Outcome.UNAVAILABLE, Outcome.UNKNOWN)
                await wait_until(lambda: server.status.reconnects == 1)
                assert (await call_tool(server, "echo", text="again")).text == "again"
