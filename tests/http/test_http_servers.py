"""Routes under /v1/servers: the state and the log of a server, and its restart by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.config.models import Limits, Server
from gateway.gateway import Gateway
from gateway.limits import LimitedToolset
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.tool_table import Source
from tests.http.api_client import ApiClient
from tests.live_server import LiveServer, live_server_async
from tests.servers.forked_server import forked_command
from tests.waiting import wait_until

CHATTY_SERVER = (Path(__file__).parents[1] / "servers" / "chatty_server.py").read_text()


@asynccontextmanager
async def serve_chatty(folder: Path) -> AsyncIterator[tuple[LiveServer, ApiClient]]:
    """A gateway over HTTP with one server that writes to standard error."""
    file = folder / "chatty.py"
    file.write_text(CHATTY_SERVER)
    command, args = forked_command(file)
    config = Server(command=command, args=tuple(args), isolation="process")

    def make() -> Gateway:
        services = Services()
        toolset = McpToolset("chatty", config, services=services)
        return Gateway([Source("chatty", LimitedToolset(toolset, Limits()), toolset, trusted=False)], services=services)

    async with live_server_async(make) as server:
        yield server, ApiClient(server.url)


async def call(client: ApiClient, name: str, **arguments: Any) -> Any:
    opened = (await client("POST", "/v1/sessions", {})).json()
    body = {"tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}
    answer = (await client("POST", f"/v1/sessions/{opened['id']}/calls", body)).json()
    await client("DELETE", f"/v1/sessions/{opened['id']}")
    return answer["results"][0]


def status_of(server: LiveServer) -> Any:
    backend: Any = server.gateway.sources[0].backend
    return backend.status


async def test_server_of_sessions_can_be_restarted(tmp_path: Path) -> None:
    """The web UI restarts a shared one: tests/browser."""
    async with serve_chatty(tmp_path) as (server, client):
        assert (await call(client, "say", text="before"))["outcome"] == "ok"
        answer = await client("POST", "/v1/servers/chatty/restart")
        assert answer.status_code == 202 and answer.json()["state"] == "restarting"
        await wait_until(lambda: status_of(server).reconnects == 1 and status_of(server).state == "up")
        assert (await call(client, "say", text="after"))["outcome"] == "ok"
        details = (await client("GET", "/v1/servers/chatty")).json()
        assert details["last_loss"] == "an operator restarted it"
        assert details["processes"] == list(status_of(server).children)


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/restart")])
async def test_unknown_server_is_not_found(client: ApiClient, method: str, path: str) -> None:
    answer = await client(method, f"/v1/servers/nobody{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "There is no server 'nobody'."
