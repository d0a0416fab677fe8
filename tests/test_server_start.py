"""The start of a gateway: it answers before its servers are up, and names those that are late."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gateway.client import RemoteGateway
from gateway.config.models import Server
from gateway.gateway import Gateway
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.server_start import ServerStart
from gateway.tool_table import Source
from gateway.types import Outcome, Task, ToolCall
from tests.live_server import live_server_async
from tests.mcp_server.clients import CLIENT_MODES, connect_client, native_source
from tests.servers.start_server import stdio_command
from tests.waiting import wait_until

CONNECT_S = 120.0
"""Longer than any test: a server that is stuck delays nobody for that long."""


def shout(text: str) -> str:
    """Says it louder."""
    return text.upper()


def server_source(name: str, services: Services, command: Sequence[str], **settings: Any) -> Source:
    config = Server(command=command[0], args=tuple(command[1:]), connect_timeout_s=CONNECT_S, **settings)
    toolset = McpToolset(name, config, services=services)
    return Source(name, toolset, toolset, trusted=False, name=name, on_clash="prefix")


def gated_command(gate: Path) -> list[str]:
    """The misbehaving server, which starts once a file exists."""
    command, args = stdio_command()
    return [
        "sh",
        "-c",
        f"while [ ! -e {shlex.quote(str(gate))} ]; do sleep 0.05; done; exec {shlex.join([command, *args])}",
    ]


STUCK = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@asynccontextmanager
async def open_gateway(gate: Path, start: ServerStart, *, stuck: bool = True) -> AsyncIterator[Gateway]:
    """A gateway with a native tool, a server that starts when the gate opens, and perhaps one that never answers."""
    services = Services()
    sources = [native_source(shout), server_source("late", services, gated_command(gate))]
    if stuck:
        sources.append(server_source("stuck", services, STUCK))
    with anyio.fail_after(90):
        async with Gateway(sources, services=services, start=start) as gateway:
            yield gateway


async def test_gateway_answers_while_servers_start_and_they_join_later(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with open_gateway(gate, ServerStart(listen_first=True, wait_s=0)) as gateway:
        assert gateway.start.names == ["late", "stuck"]
        assert [spec.name for spec in gateway.specs] == ["shout"]
        async with gateway.open() as early:
            assert (await early.call(ToolCall("1", "shout", '{"text": "a"}'))).text == "A"
            missing = await early.call(ToolCall("2", "echo", '{"text": "a"}'))
            assert missing.outcome is Outcome.UNAVAILABLE and "'late'" in (missing.reason or "")
        gate.touch()
        async with gateway.open(Task(tools=("echo",))) as session:
            assert (await session.call(ToolCall("1", "echo", '{"text": "here"}'))).text == "here"
        assert gateway.start.names == ["stuck"]


async def test_listings_and_sessions_wait_for_servers_that_start_in_time(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    start = ServerStart(listen_first=True, wait_s=60)
    async with open_gateway(gate, start, stuck=False) as gateway, gateway.open() as session:
        assert {"shout", "echo"} <= {spec.name for spec in session.specs}


@pytest.mark.parametrize("protocol", list(CLIENT_MODES))
async def test_mcp_client_is_told_when_a_server_joins(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server_start.LATE_TOOL_S", 0.1)
    gate = tmp_path / "gate"
    changed = anyio.Event()

    async def on_message(message: Any) -> None:
        if "tools/list_changed" in str(getattr(message, "method", "")):
            changed.set()

    async with (
        open_gateway(gate, ServerStart(listen_first=True, wait_s=0.1)) as gateway,
        connect_client(protocol, gateway, message_handler=on_message) as client,
    ):
        assert [tool.name for tool in (await client.list_tools()).tools] == ["shout"]
        early = await client.call_tool("echo", {"text": "a"})
        assert early.is_error and "servers 'late', 'stuck' are still starting" in str(early.content)
        gate.touch()
        if protocol == "2025":
            await changed.wait()
        else:
            await wait_until(lambda: gateway.start.names == ["stuck"], 60)
        listed = await client.list_tools(cache_mode="refresh")
        assert {"shout", "echo"} <= {tool.name for tool in listed.tools}
        assert not (await client.call_tool("echo", {"text": "a"})).is_error


async def test_health_names_the_starting_servers_and_a_remote_trainer_waits_for_them(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def make() -> Gateway:
        services = Services()
        sources = [native_source(shout), server_source("late", services, gated_command(gate))]
        return Gateway(sources, services=services, start=ServerStart(listen_first=True, wait_s=0))

    with anyio.fail_after(90):
        async with live_server_async(make) as server:
            remote = RemoteGateway(server.url)
            async with anyio.create_task_group() as tasks:
                seen: dict[str, Any] = {}

                async def look() -> None:
                    plain = RemoteGateway(server.url)
                    plain._wait_for_servers = anyio.lowlevel.checkpoint  # type: ignore[method-assign]
                    async with plain:
                        seen.update(await plain.request_json("GET", "/healthz"))
                        seen["early"] = [spec.name for spec in plain.specs]
                    gate.touch()

                tasks.start_soon(look)
                async with remote:
                    assert {"shout", "echo"} <= {spec.name for spec in remote.specs}
            assert seen["starting"] == ["late"] and seen["status"] == "degraded"
            assert seen["servers"]["late"]["state"] == "starting" and seen["early"] == ["shout"]
