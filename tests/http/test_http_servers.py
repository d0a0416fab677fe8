"""Routes under /v1/servers: the state of a server, and its restart by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.gateway import Gateway
from tests.conftest import Write
from tests.http.api_client import ApiClient
from tests.live_server import live_server_async
from tests.servers.forked_server import forked_command
from tests.waiting import wait_until

CHATTY_SERVER = Path(__file__).parents[1] / "servers" / "chatty_server.py"


async def say(client: ApiClient) -> str:
    """The outcome of a call in a session of its own."""
    id = await client.begin()
    results = (await client.call(id, "say", {"text": "hello"}))["results"]
    await client("DELETE", f"/v1/sessions/{id}")
    return str(results[0]["outcome"])


async def test_server_of_sessions_can_be_restarted(write: Write) -> None:
    """The web UI restarts a shared one, and shows its log: tests/browser."""
    command, args = forked_command(CHATTY_SERVER)
    chatty = {"command": command, "args": args, "isolation": "process"}
    file = write("servers.json", json.dumps({"mcpServers": {"chatty": chatty}}))
    async with live_server_async(lambda: Gateway.load(None, file)) as server:
        client = ApiClient(server.url)
        backend: Any = server.gateway.sources[0].backend
        assert await say(client) == "ok"
        answer = await client("POST", "/v1/servers/chatty/restart")
        assert answer.status_code == 202 and answer.json()["state"] == "restarting"
        await wait_until(lambda: backend.status.reconnects == 1 and backend.status.state == "up")
        assert await say(client) == "ok"
        details = (await client("GET", "/v1/servers/chatty")).json()
        assert details["name"] == "chatty" and details["last_loss"] == "an operator restarted it"


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("POST", "/restart")])
async def test_unknown_server_is_not_found(client: ApiClient, method: str, path: str) -> None:
    answer = await client(method, f"/v1/servers/nobody{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "There is no server 'nobody'."
