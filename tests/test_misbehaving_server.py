"""The misbehaving server has exactly the faults that it declares, over all three transports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
import psutil
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp_types import REQUEST_TIMEOUT, CallToolResult, ListToolsRequest, ListToolsResult

from tests.servers.start_server import free_port, serve_misbehaving, stdio_command
from tests.waiting import PATIENCE_S

TRANSPORTS = ("stdio", "sse", "http")
all_transports = pytest.mark.parametrize("transport", TRANSPORTS)


@asynccontextmanager
async def connect_client(transport: str, *flags: str, **options: Any) -> AsyncIterator[Client]:
    with anyio.fail_after(60):
        if transport == "stdio":
            command, args = stdio_command(*flags)
            async with Client(StdioServerParameters(command=command, args=args), mode="legacy", **options) as client:
                yield client
            return
        async with serve_misbehaving("sse" if transport == "sse" else "http", *flags) as url:
            target = sse_client(url) if transport == "sse" else url
            async with Client(target, mode="legacy", **options) as client:
                yield client


def text_of(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content if part.type == "text")


def call_request(tool: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Polls until the condition holds: another process has no event to wait for."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            if await condition():
                return
            await anyio.sleep(0.02)


async def wait_until_gone(pid: int) -> None:
    async def pids() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await wait_until(pids)


@all_transports
async def test_correct_tools_answer_correctly(transport: str) -> None:
    async with connect_client(transport) as client:
        assert {"echo", "hang", "mixed", "grow"} <= {tool.name for tool in (await client.list_tools()).tools}
        assert text_of(await client.call_tool("echo", {"text": "hällo\n"})) == "hällo\n"
        mixed = await client.call_tool("mixed", {})
        kinds = [part.type for part in mixed.content]
        assert kinds == ["text", "image", "audio", "resource", "resource_link", "text"]
        assert (await client.call_tool("structured", {"a": 1, "b": 2})).structured_content == {"sum": 3}
        assert [text_of(await client.call_tool("count", {})) for _ in range(3)] == ["1", "2", "3"]
        assert (await client.call_tool("fail", {})).is_error
        assert len(text_of(await client.call_tool("huge", {"mb": 0.5}))) == 512 * 1024


@all_transports
async def test_cancelled_request_is_recorded_and_the_connection_stays_open(transport: str) -> None:
    async with connect_client(transport) as client:
        with pytest.raises(MCPError) as error_info:
            await client.call_tool("hang", {}, read_timeout_seconds=0.3)
        assert error_info.value.code == REQUEST_TIMEOUT

        async def remembered() -> bool:
            return bool(json.loads(text_of(await client.call_tool("was_cancelled", {})))["tools"] == ["hang"])

        await wait_until(remembered)


@all_transports
async def test_faulty_tools_answer_with_their_faults(transport: str) -> None:
    async with connect_client(transport) as client:
        with pytest.raises(MCPError, match="the server failed"):
            await client.call_tool("rpc_error", {})
        assert not (await client.call_tool("flaky", {})).is_error
        assert (await client.call_tool("flaky", {})).is_error
        assert text_of(await client.call_tool("twice", {})) == "first"
        for kind in ("unknown_type", "missing_field", "string", "null"):
            with pytest.raises(ValueError, match="validation error"):
                await client.call_tool("bad_content", {"kind": kind})
        assert text_of(await client.call_tool("echo", {"text": "still here"})) == "still here"


@pytest.mark.parametrize("transport", ["stdio", "sse"])
async def test_garbage_and_unknown_ids_come_between_valid_messages(transport: str) -> None:
    async with connect_client(transport, "--garbage-first") as client:
        assert text_of(await client.call_tool("garbage", {})) == "after the garbage"
        with pytest.raises(MCPError) as error_info:
            await client.call_tool("wrong_id", {}, read_timeout_seconds=0.3)
        assert error_info.value.code == REQUEST_TIMEOUT


async def test_garbage_and_unknown_ids_come_in_the_stream_of_the_request() -> None:
    """Read without an MCP client, which would take any answer in that stream for its own."""
    async with serve_misbehaving("http", "--garbage-first") as url, httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        stream = (await http.post(url, json=call_request("garbage"))).text
        assert stream.count("data: ") == 3 and stream.count("data: {") == 1
        frames: list[str] = []
        with anyio.fail_after(PATIENCE_S):
            async with http.stream("POST", url, json=call_request("wrong_id")) as response:
                async for line in response.aiter_lines():
                    frames.append(line)
                    if "nobody-asked" in line:
                        break
        assert json.loads(frames[-1].removeprefix("data: "))["id"] == "nobody-asked"


@all_transports
async def test_progress_is_reported(transport: str) -> None:
    async with connect_client(transport) as client:
        reported: list[tuple[float, float | None]] = []

        async def on_event(progress: float, total: float | None, message: str | None) -> None:
            reported.append((progress, total))

        await client.call_tool("slow", {"seconds": 0.1}, progress_callback=on_event)
        assert (0, 1) in reported


@all_transports
async def test_grown_listing_is_announced(transport: str) -> None:
    announced = anyio.Event()

    async def on_event(message: Any) -> None:
        if getattr(message, "method", "") == "notifications/tools/list_changed":
            announced.set()

    async with connect_client(transport, message_handler=on_event) as client:
        name = text_of(await client.call_tool("grow", {}))
        with anyio.fail_after(PATIENCE_S):
            await announced.wait()
        listed = await client.list_tools(cache_mode="refresh")
        assert name in {tool.name for tool in listed.tools}
        assert text_of(await client.call_tool(name, {"text": "grown"})) == "grown"


async def test_crash_of_a_stdio_server_closes_the_connection() -> None:
    async with connect_client("stdio") as client:
        with pytest.raises(MCPError, match="Connection closed"):
            await client.call_tool("crash", {})


@all_transports
async def test_paged_listing_ends(transport: str) -> None:
    async with connect_client(transport, "--pages", "4") as client:
        names, cursor, pages = list[str](), None, 0
        while pages == 0 or cursor is not None:
            listed = await client.list_tools(cursor=cursor)
            names += [tool.name for tool in listed.tools]
            cursor, pages = listed.next_cursor, pages + 1
        assert pages == 4
        assert {"echo", "spawn_grandchild"} <= set(names)
        assert len(names) == len(set(names))


async def test_endless_listing_always_has_a_next_page() -> None:
    async with connect_client("stdio", "--endless-pages") as client:
        cursor: str | None = None
        for _ in range(50):
            cursor = (await client.list_tools(cursor=cursor)).next_cursor
            assert cursor is not None


async def test_strict_client_rejects_the_malformed_listing() -> None:
    async with connect_client("stdio", "--bad-tools", "--schema-mb", "5") as client:
        with pytest.raises(ValueError, match="validation error"):
            await client.list_tools()
        await client.session.send_ping()


async def test_too_deeply_nested_listing_is_never_parsed() -> None:
    async with connect_client("stdio", "--bad-tools", "--schema-depth", "400") as client:
        listing = ListToolsRequest(method="tools/list")
        with pytest.raises(MCPError) as error_info:
            await client.session.send_request(listing, ListToolsResult, request_read_timeout_seconds=1)
        assert error_info.value.code == REQUEST_TIMEOUT


@all_transports
async def test_silent_server_times_out(transport: str) -> None:
    with pytest.raises((MCPError, BaseExceptionGroup)):
        async with connect_client(transport, "--never-answer", read_timeout_seconds=1):
            pass


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_token_is_required_with_the_flag(transport: str) -> None:
    server = serve_misbehaving("sse" if transport == "sse" else "http", "--require-token", "s3cret")
    async with server as url, httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        unauthorized = await http.get(url)
        assert unauthorized.status_code == 401
        assert unauthorized.headers["www-authenticate"].startswith("Bearer")
        headers = {"Authorization": "Bearer s3cret", "Accept": "text/event-stream"}
        async with http.stream("GET", url, headers=headers) as stream:
            assert stream.status_code in (200, 404)


async def test_json_answers_offer_the_same_tools() -> None:
    async with connect_client("http", "--json-answers") as client:
        assert text_of(await client.call_tool("slow", {"seconds": 0})) == "at last"
        assert len(text_of(await client.call_tool("huge", {"mb": 3}))) == 3 * 1024 * 1024


async def test_server_restarts_at_its_port_without_old_sessions() -> None:
    port = str(free_port())
    initialize = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        async with serve_misbehaving("http", "--listen-port", port) as url:
            assert urlsplit(url).port == int(port)
            session = (await http.post(url, json=initialize)).headers["mcp-session-id"]
        with pytest.raises(httpx2.ConnectError):
            await http.post(url, json=initialize)
        async with serve_misbehaving("http", "--listen-port", port) as url:
            response = await http.post(url, json=initialize | {"method": "ping"}, headers={"mcp-session-id": session})
            assert response.status_code == 404


async def test_process_group_is_killed_though_it_ignores_sigterm() -> None:
    async with serve_misbehaving("http", "--ignore-term") as url, Client(url, mode="legacy") as client:
        server = int(text_of(await client.call_tool("pid", {})))
        grandchild = int(text_of(await client.call_tool("spawn_grandchild", {})))
        psutil.Process(server).terminate()
        await anyio.sleep(0.3)  # the time in which it would have heard of it
        assert text_of(await client.call_tool("echo", {"text": "here"})) == "here"
        pids = server, grandchild
    for pid in pids:
        await wait_until_gone(pid)


def test_exit_flag_sets_the_exit_code_and_a_message() -> None:
    command, args = stdio_command("--exit-at-once", "7")
    process = subprocess.run([command, *args], capture_output=True, timeout=120, text=True)
    assert process.returncode == 7
    assert "exit at once" in process.stderr


def test_stdio_server_survives_end_of_input_only_with_ignore_term() -> None:
    for flags, keeps_running in (((), False), (("--ignore-term",), True)):
        command, args = stdio_command(*flags)
        with subprocess.Popen([command, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
            process.stdin.flush()
            process.stdout.readline()
            process.stdin.close()
            if keeps_running:
                process.terminate()
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)
                process.kill()
            assert process.wait(20) == (-9 if keeps_running else 0)
    assert sys.executable == command
