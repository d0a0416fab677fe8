"""The misbehaving server is itself right where it says so, and wrong as it says, on all three transports."""

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

from tests.servers.start import free_port, serving, stdio_command

TRANSPORTS = ("stdio", "sse", "http")
everywhere = pytest.mark.parametrize("transport", TRANSPORTS)


@asynccontextmanager
async def connected(transport: str, *flags: str, **options: Any) -> AsyncIterator[Client]:
    with anyio.fail_after(60):
        if transport == "stdio":
            command, args = stdio_command(*flags)
            async with Client(StdioServerParameters(command=command, args=args), mode="legacy", **options) as client:
                yield client
            return
        async with serving("sse" if transport == "sse" else "http", *flags) as url:
            target = sse_client(url) if transport == "sse" else url
            async with Client(target, mode="legacy", **options) as client:
                yield client


def said(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content if part.type == "text")


def called(tool: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


async def eventually(true: Callable[[], Awaitable[bool]]) -> None:
    """Another process tells nobody when it is done, so it is asked again and again, for a bounded while."""
    with anyio.fail_after(10):
        while True:
            if await true():
                return
            await anyio.sleep(0.02)


async def gone(pid: int) -> None:
    async def ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await eventually(ended)


@everywhere
async def test_right_tools_are_right(transport: str) -> None:
    async with connected(transport) as client:
        assert {"echo", "hang", "mixed", "grow"} <= {tool.name for tool in (await client.list_tools()).tools}
        assert said(await client.call_tool("echo", {"text": "hällo\n"})) == "hällo\n"
        mixed = await client.call_tool("mixed", {})
        kinds = [part.type for part in mixed.content]
        assert kinds == ["text", "image", "audio", "resource", "resource_link", "text"]
        assert (await client.call_tool("structured", {"a": 1, "b": 2})).structured_content == {"sum": 3}
        assert [said(await client.call_tool("count", {})) for _ in range(3)] == ["1", "2", "3"]
        assert (await client.call_tool("fail", {})).is_error
        assert len(said(await client.call_tool("huge", {"mb": 0.5}))) == 512 * 1024


@everywhere
async def test_a_cancelled_request_is_remembered_and_the_connection_lives(transport: str) -> None:
    async with connected(transport) as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("hang", {}, read_timeout_seconds=0.3)
        assert caught.value.code == REQUEST_TIMEOUT

        async def remembered() -> bool:
            return bool(json.loads(said(await client.call_tool("was_cancelled", {})))["tools"] == ["hang"])

        await eventually(remembered)


@everywhere
async def test_wrong_answers_are_wrong(transport: str) -> None:
    async with connected(transport) as client:
        with pytest.raises(MCPError, match="the server failed"):
            await client.call_tool("rpc_error", {})
        assert not (await client.call_tool("flaky", {})).is_error
        assert (await client.call_tool("flaky", {})).is_error
        assert said(await client.call_tool("twice", {})) == "first"
        for kind in ("unknown_type", "missing_field", "string", "null"):
            with pytest.raises(ValueError, match="validation error"):
                await client.call_tool("bad_content", {"kind": kind})
        assert said(await client.call_tool("echo", {"text": "still here"})) == "still here"


@pytest.mark.parametrize("transport", ["stdio", "sse"])
async def test_garbage_and_answers_to_nobody_come_between_the_right_frames(transport: str) -> None:
    async with connected(transport, "--garbage-first") as client:
        assert said(await client.call_tool("garbage", {})) == "after the garbage"
        with pytest.raises(MCPError) as caught:
            await client.call_tool("wrong_id", {}, read_timeout_seconds=0.3)
        assert caught.value.code == REQUEST_TIMEOUT


async def test_garbage_and_answers_to_nobody_stand_in_the_stream_of_the_request() -> None:
    """Read without a client, which would take any answer in that stream for its own."""
    async with serving("http", "--garbage-first") as url, httpx2.AsyncClient() as http:
        stream = (await http.post(url, json=called("garbage"))).text
        assert stream.count("data: ") == 3 and stream.count("data: {") == 1
        frames: list[str] = []
        with anyio.fail_after(10):
            async with http.stream("POST", url, json=called("wrong_id")) as response:
                async for line in response.aiter_lines():
                    frames.append(line)
                    if "nobody-asked" in line:
                        break
        assert json.loads(frames[-1].removeprefix("data: "))["id"] == "nobody-asked"


@everywhere
async def test_progress_is_reported(transport: str) -> None:
    async with connected(transport) as client:
        seen: list[tuple[float, float | None]] = []

        async def hear(progress: float, total: float | None, message: str | None) -> None:
            seen.append((progress, total))

        await client.call_tool("slow", {"seconds": 0.1}, progress_callback=hear)
        assert (0, 1) in seen


@everywhere
async def test_a_grown_listing_is_announced(transport: str) -> None:
    heard = anyio.Event()

    async def hear(message: Any) -> None:
        if getattr(message, "method", "") == "notifications/tools/list_changed":
            heard.set()

    async with connected(transport, message_handler=hear) as client:
        name = said(await client.call_tool("grow", {}))
        with anyio.fail_after(10):
            await heard.wait()
        listed = await client.list_tools(cache_mode="refresh")
        assert name in {tool.name for tool in listed.tools}
        assert said(await client.call_tool(name, {"text": "grown"})) == "grown"


async def test_a_stdio_server_that_crashes_loses_its_connection() -> None:
    async with connected("stdio") as client:
        with pytest.raises(MCPError, match="Connection closed"):
            await client.call_tool("crash", {})


@everywhere
async def test_pages_are_walked_to_the_end(transport: str) -> None:
    async with connected(transport, "--pages", "4") as client:
        names, cursor, pages = list[str](), None, 0
        while pages == 0 or cursor is not None:
            listed = await client.list_tools(cursor=cursor)
            names += [tool.name for tool in listed.tools]
            cursor, pages = listed.next_cursor, pages + 1
        assert pages == 4
        assert {"echo", "spawn_grandchild"} <= set(names)
        assert len(names) == len(set(names))


async def test_endless_pages_do_not_end() -> None:
    async with connected("stdio", "--endless-pages") as client:
        cursor: str | None = None
        for _ in range(50):
            cursor = (await client.list_tools(cursor=cursor)).next_cursor
            assert cursor is not None


async def test_a_malformed_listing_is_refused_by_a_strict_client() -> None:
    async with connected("stdio", "--bad-tools", "--schema-mb", "5") as client:
        with pytest.raises(ValueError, match="validation error"):
            await client.list_tools()
        await client.session.send_ping()


async def test_a_listing_nested_too_deeply_is_never_read() -> None:
    async with connected("stdio", "--bad-tools", "--schema-depth", "400") as client:
        listing = ListToolsRequest(method="tools/list")
        with pytest.raises(MCPError) as caught:
            await client.session.send_request(listing, ListToolsResult, request_read_timeout_seconds=1)
        assert caught.value.code == REQUEST_TIMEOUT


@everywhere
async def test_a_server_that_never_answers_is_waited_for_in_vain(transport: str) -> None:
    with pytest.raises((MCPError, BaseExceptionGroup)):
        async with connected(transport, "--never-answer", read_timeout_seconds=1):
            pass


@pytest.mark.parametrize("transport", ["sse", "http"])
async def test_a_token_is_required_when_it_says_so(transport: str) -> None:
    served = serving("sse" if transport == "sse" else "http", "--require-token", "s3cret")
    async with served as url, httpx2.AsyncClient() as http:
        refused = await http.get(url)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Bearer")
        headers = {"Authorization": "Bearer s3cret", "Accept": "text/event-stream"}
        async with http.stream("GET", url, headers=headers) as opened:
            assert opened.status_code in (200, 404)


async def test_json_answers_serve_the_same_tools() -> None:
    async with connected("http", "--json-answers") as client:
        assert said(await client.call_tool("slow", {"seconds": 0})) == "at last"
        assert len(said(await client.call_tool("huge", {"mb": 3}))) == 3 * 1024 * 1024


async def test_a_server_comes_back_at_its_port_and_knows_no_old_session() -> None:
    port = str(free_port())
    say = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
    async with httpx2.AsyncClient() as http:
        async with serving("http", "--listen-port", port) as url:
            assert urlsplit(url).port == int(port)
            session = (await http.post(url, json=say)).headers["mcp-session-id"]
        with pytest.raises(httpx2.ConnectError):
            await http.post(url, json=say)
        async with serving("http", "--listen-port", port) as url:
            old = await http.post(url, json=say | {"method": "ping"}, headers={"mcp-session-id": session})
            assert old.status_code == 404


async def test_serving_ends_the_whole_group_though_it_ignores_requests_to_end() -> None:
    async with serving("http", "--ignore-term") as url, Client(url, mode="legacy") as client:
        server = int(said(await client.call_tool("pid", {})))
        grandchild = int(said(await client.call_tool("spawn_grandchild", {})))
        psutil.Process(server).terminate()
        await anyio.sleep(0.3)  # the time in which it would have heard of it
        assert said(await client.call_tool("echo", {"text": "here"})) == "here"
        ended = server, grandchild
    for pid in ended:
        await gone(pid)


def test_a_server_told_to_exit_leaves_its_code_and_a_reason() -> None:
    command, args = stdio_command("--exit-at-once", "7")
    ran = subprocess.run([command, *args], capture_output=True, timeout=30, text=True)
    assert ran.returncode == 7
    assert "exit at once" in ran.stderr


def test_a_stdio_server_stays_after_the_end_of_its_input_only_when_told_so() -> None:
    for flags, stays in (((), False), (("--ignore-term",), True)):
        command, args = stdio_command(*flags)
        with subprocess.Popen([command, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
            process.stdin.flush()
            process.stdout.readline()
            process.stdin.close()
            if stays:
                process.terminate()
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(0.5)
                process.kill()
            assert process.wait(20) == (-9 if stays else 0)
    assert sys.executable == command
