"""A server that cannot be reached ends in one clear reason within its deadline, and stops nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import psutil
import pytest

from gateway.config.models import Server
from gateway.types import Outcome
from gateway.upstream.server import McpToolset
from gateway.upstream.services import Services
from tests.servers.start import free_port, serving, stdio_command
from tests.upstream.reach import TRANSPORTS, call, eventually, reached, toolset

everywhere = pytest.mark.parametrize("transport", TRANSPORTS)


def python(code: str, **config: object) -> Server:
    return Server(command=sys.executable, args=("-c", code), **config)  # type: ignore[arg-type]


@everywhere
async def test_a_server_that_never_answers_ends_within_its_deadline(transport: str) -> None:
    began = anyio.current_time()
    async with reached(transport, "--never-answer", connect_timeout_s=1.5) as server:
        assert server.status.state == "down" and server.status.remedy
        assert "no answer within 1.5 s" in server.status.reason
        assert server.specs == ()
        assert anyio.current_time() - began < 15


async def test_entering_waits_no_longer_than_the_deadline_of_connecting() -> None:
    command, args = stdio_command("--never-answer", "--ignore-term")
    async with Services() as services:
        server = McpToolset("it", Server(command=command, args=tuple(args), connect_timeout_s=0.5), services=services)
        with anyio.fail_after(20):
            began = anyio.current_time()
            async with server:
                assert anyio.current_time() - began < 5


async def test_a_gateway_that_is_cancelled_while_entering_leaves_no_child() -> None:
    command, args = stdio_command("--never-answer")
    config = Server(command=command, args=tuple(args), connect_timeout_s=20)
    async with Services() as services:
        server = McpToolset("it", config, services=services)
        with anyio.move_on_after(0.5) as scope:
            await server.__aenter__()
        assert scope.cancelled_caught
        running = [child.cmdline() for child in psutil.Process().children(recursive=True)]
        assert not [line for line in running if "--never-answer" in line]


async def test_all_servers_together_start_no_more_children_than_allowed() -> None:
    command, args = stdio_command()
    config = Server(command=command, args=tuple(args))
    hasty = config.model_copy(update={"connect_timeout_s": 1})
    async with (
        Services(children=1) as services,
        McpToolset("one", config, services=services) as one,
        McpToolset("two", hasty, services=services) as two,
    ):
        await eventually(lambda: two.status.state == "down")
        assert one.status.state == "up"
        assert "no place for another child process" in two.status.reason


async def test_a_process_that_exits_says_its_code_and_its_last_words() -> None:
    config = python("import sys; sys.stderr.write('no API key given'); sys.exit(9)")
    async with toolset(config) as server:
        status = server.status
        assert status.state == "down"
        assert "exited with 9" in status.reason and "no API key given" in status.reason
        assert (await call(server, "echo")).outcome is Outcome.INVALID


async def test_output_that_is_no_protocol_is_shown_in_the_reason() -> None:
    config = python("print('usage: server [--port N]')")
    async with toolset(config) as server:
        assert "usage: server" in server.status.reason


async def test_a_line_without_an_end_does_not_fill_the_memory() -> None:
    endless = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    async with toolset(python(endless, result_bytes=200_000, connect_timeout_s=1.0)) as server:
        await eventually(lambda: server.status.state == "down")
        assert "200000 bytes" in server.status.reason or "no answer" in server.status.reason


async def test_an_endless_flood_of_too_long_lines_ends_the_connection() -> None:
    flood = "import sys\nwhile True: sys.stdout.write('x' * 300000 + chr(10))"
    async with toolset(python(flood, result_bytes=200_000)) as server:
        assert "a line of more than 200000 bytes" in server.status.reason


@pytest.mark.parametrize(
    "config", [{"command": "/no/such/program"}, {"command": sys.executable, "cwd": Path("/no/such")}]
)
async def test_a_program_that_cannot_be_started_is_named(config: dict[str, object]) -> None:
    async with toolset(Server(**config)) as server:  # type: ignore[arg-type]
        assert server.status.state == "down"
        assert "cannot start" in server.status.reason and "`command`" in server.status.remedy


async def test_a_port_where_nobody_listens_is_named() -> None:
    port = free_port()
    async with toolset(Server(url=f"http://127.0.0.1:{port}/mcp")) as server:
        assert f"cannot connect to 127.0.0.1:{port}" in server.status.reason
        assert "start the server" in server.status.remedy


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_a_missing_token_is_said_with_its_remedy(transport: str) -> None:
    async with reached(transport, "--require-token", "s3cret") as server:
        status = server.status
        assert status.state == "down" and "HTTP 401" in status.reason and "invalid_token" in status.reason
        assert "auth_token" in status.remedy


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_a_token_is_sent_and_shown_nowhere(transport: str) -> None:
    async with reached(transport, "--require-token", "s3cret", auth_token="s3cret") as server:
        assert (await call(server, "echo", text="let in")).text == "let in"
        assert "s3cret" not in repr(server.status) + repr(server.config)


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_a_bare_url_finds_its_transport(transport: str) -> None:
    async with serving(transport) as url, toolset(Server(url=url)) as server:  # type: ignore[arg-type]
        assert server.status.transport == {"sse": "sse", "http": "streamable-http"}[transport]
        assert (await call(server, "echo", text="found")).text == "found"


@pytest.mark.parametrize(("transport", "wrong"), [("sse", "streamable-http"), ("http", "sse")])
async def test_a_wrong_transport_is_said_to_be_wrong(transport: str, wrong: str) -> None:
    async with serving(transport) as url, toolset(Server(url=url, transport=wrong)) as server:  # type: ignore[arg-type]
        assert server.status.state == "down"
        assert "HTTP 40" in server.status.reason


async def test_an_address_that_is_no_mcp_server_is_said_in_both_ways() -> None:
    async with serving("http") as url, toolset(Server(url=url.replace("/mcp", "/other"))) as server:
        reason = server.status.reason
        assert "as streamable-http" in reason and "as sse" in reason and "HTTP 404" in reason
        assert "transport" in server.status.remedy


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_a_server_that_goes_and_comes_back_is_found_again(transport: str) -> None:
    port = free_port()
    with anyio.fail_after(60):
        async with Services() as services:
            async with serving(transport, "--listen-port", str(port)) as url:  # type: ignore[arg-type]
                server = McpToolset("it", Server(url=url), services=services)
                stack = await server.__aenter__()
                before = server.specs
            try:
                await eventually_failing(stack)
                assert server.specs is before
                await eventually(lambda: server.status.state == "stale")
                assert "cannot connect" in server.status.reason
                refused = await call(server, "echo", text="x")
                assert refused.outcome is Outcome.UNAVAILABLE
                async with serving(transport, "--listen-port", str(port)):  # type: ignore[arg-type]
                    await eventually(lambda: server.status.state == "up", within_s=40)
                    assert (await call(server, "echo", text="back")).text == "back"
                    assert server.specs is before and server.status.reconnects >= 1
            finally:
                await server.__aexit__(None, None, None)


async def eventually_failing(server: McpToolset) -> None:
    """Calls until one is refused: the death of a server that we do not hold shows in the next call."""
    with anyio.fail_after(15):
        while (await call(server, "echo", text="x")).outcome is not Outcome.UNAVAILABLE:  # noqa: ASYNC110 (no event)
            await anyio.sleep(0.02)


async def test_a_session_that_the_server_forgot_is_opened_anew() -> None:
    port = free_port()
    with anyio.fail_after(60):
        async with Services() as services:
            async with serving("http", "--listen-port", str(port)) as url:
                server = McpToolset("it", Server(url=url), services=services)
                await server.__aenter__()
            try:
                async with serving("http", "--listen-port", str(port)):
                    first = await call(server, "echo", text="x")
                    assert first.outcome in (Outcome.UNAVAILABLE, Outcome.UNKNOWN)
                    await eventually(lambda: server.status.reconnects == 1)
                    assert (await call(server, "echo", text="again")).text == "again"
            finally:
                await server.__aexit__(None, None, None)
