"""A server whose tool blocks it as a whole is found out by a ping and recycled; everyone who is concerned is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from gateway.gateway import Gateway
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.server_status import ServerStatus
from gateway.session import GatewaySession
from gateway.types import Outcome, Text, ToolCall, ToolResult
from tests.servers.start_server import serve_misbehaving, stdio_command
from tests.third_party.peers import write_servers
from tests.waiting import wait_until

HOUR_S = 3600.0
WITHIN_S = 90.0
STILL_S = 3.0
"""For longer, no machine is expected to stand still, which looks like a server that hangs."""


def status_of(gateway: Gateway) -> ServerStatus:
    backend = gateway.sources[0].backend
    assert isinstance(backend, McpToolset)
    return backend.status


async def use_tool(session: GatewaySession, name: str, **arguments: Any) -> ToolResult:
    return await session.call(ToolCall("1", name, json.dumps(arguments)))


async def use_until_it_works(session: GatewaySession, name: str, **arguments: Any) -> ToolResult:
    """Calls again while the server is away; a busy machine may need more than one restart."""
    with anyio.fail_after(WITHIN_S):
        while True:
            result = await use_tool(session, name, **arguments)
            if result.outcome is Outcome.OK:
                return result
            assert result.outcome.is_infrastructure
            await anyio.sleep(0.1)


def open_gateway(folder: Path, entry: dict[str, Any]) -> Gateway:
    offers = [
        {"server": "blocking", "allow": ["block"], "timeout_s": 1.0},
        {"server": "blocking", "allow": ["echo", "pid"], "timeout_s": 60.0},
    ]
    tools = folder / "tools.yaml"
    tools.write_text(json.dumps({"tools": offers}))
    return Gateway.load(tools, write_servers(folder, blocking=entry))


def blocking_stdio(**settings: float) -> dict[str, Any]:
    command, args = stdio_command()
    return {"command": command, "args": args, "ping_timeout_s": STILL_S, **settings}


async def test_blocking_tool_of_a_shared_stdio_server_costs_only_the_calls_under_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: dict[str, ToolResult] = {}
    gateway = open_gateway(tmp_path, blocking_stdio())
    with anyio.fail_after(2 * WITHIN_S):
        async with gateway, gateway.open() as blocked, gateway.open() as other:
            await use_tool(other, "echo", text="before")
            old_pid = (await use_tool(other, "pid")).text

            async def call_meanwhile() -> None:
                outcomes["meanwhile"] = await use_tool(other, "echo", text="meanwhile")

            outcomes["blocked"] = await use_tool(blocked, "block", seconds=HOUR_S)
            await wait_until(lambda: status_of(gateway).state == "unresponsive")
            assert "a call was not answered in time" in status_of(gateway).reason
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call_meanwhile)
            after = await use_until_it_works(other, "echo", text="after")
            assert (await use_tool(other, "pid")).text != old_pid
            status = status_of(gateway)
    assert outcomes["blocked"].outcome is Outcome.TIMEOUT
    assert outcomes["meanwhile"].outcome is Outcome.UNKNOWN and "it hangs" in (outcomes["meanwhile"].reason or "")
    assert after.text.startswith("after") and "was restarted" in after.text and after.metrics["state_lost"] == 1
    assert status.state == "up" and status.reconnects >= 1 and "a ping was not answered" in status.last_loss
    assert "server 'blocking' is down: it hangs" in caplog.text
    assert "was restarted and works again" in caplog.text


async def test_stopped_stdio_server_is_restarted_before_anyone_calls(tmp_path: Path) -> None:
    gateway = open_gateway(tmp_path, blocking_stdio(ping_s=0.5))
    with anyio.fail_after(2 * WITHIN_S):
        async with gateway, gateway.open() as session:
            process = psutil.Process(int((await use_until_it_works(session, "pid")).text))
            process.suspend()
            await wait_until(lambda: not process.is_running(), WITHIN_S)
            answer, told = (await use_until_it_works(session, "pid")).parts
            assert isinstance(answer, Text) and int(answer.text) != process.pid
            assert isinstance(told, Text) and "was restarted" in told.text
            assert "nothing came from it for 0.5 s" in status_of(gateway).last_loss


async def test_blocked_http_server_is_reported_and_connected_to_again(tmp_path: Path) -> None:
    with anyio.fail_after(2 * WITHIN_S):
        async with serve_misbehaving("http") as url:
            entry = {"url": url, "transport": "http", "ping_timeout_s": 1.0, "connect_timeout_s": 5.0}
            gateway = open_gateway(tmp_path, entry)
            async with gateway:
                await wait_until(lambda: status_of(gateway).state == "up", WITHIN_S)
                async with gateway.open() as session:
                    blocked = await use_tool(session, "block", seconds=2 * STILL_S)
                    assert blocked.outcome is Outcome.TIMEOUT
                    await wait_until(lambda: status_of(gateway).state in ("restarting", "stale"), WITHIN_S)
                    assert "a ping was not answered" in status_of(gateway).last_loss
                    await use_until_it_works(session, "echo", text="after")
                    await wait_until(lambda: status_of(gateway).state == "up", WITHIN_S)
                    assert status_of(gateway).reconnects >= 1
