"""How many functions of ours a tool call passes through, from HTTP to a server over stdio."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from mcp_types import JSONRPCMessage, JSONRPCRequest

import gateway
from gateway.gateway import Gateway
from gateway.mcp_client.child_process import StdinWriter
from tests.http.api_client import ApiClient
from tests.live_server import live_server_async
from tests.servers.start_server import stdio_command

FOLDER = str(Path(gateway.__file__).parent)
AROUND = 2
"""The HTTP protocol before, and the task that writes to the server after."""


async def test_call_reaches_a_stdio_server_in_at_most_fifteen_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains: list[list[str]] = []
    send = StdinWriter.send

    async def record(self: StdinWriter, message: JSONRPCMessage, headers: Mapping[str, str]) -> None:
        if isinstance(message, JSONRPCRequest) and message.method == "tools/call":
            frame, chain = sys._getframe(1), ["StdinWriter.send"]
            while frame is not None:
                code = frame.f_code
                if code.co_filename.startswith(FOLDER):
                    chain.append(code.co_qualname)
                frame = frame.f_back  # type: ignore[assignment]
            chains.append(chain)
        await send(self, message, headers)

    monkeypatch.setattr(StdinWriter, "send", record)
    command, args = stdio_command()
    servers = tmp_path / "mcp_servers.json"
    servers.write_text(json.dumps({"mcpServers": {"it": {"command": command, "args": args}}}))
    async with live_server_async(lambda: Gateway.load(None, servers)) as server:
        client = ApiClient(server.url)
        session = (await client("POST", "/v1/sessions", {})).json()
        (name,) = [tool["function"]["name"] for tool in session["tools"] if tool["function"]["name"].endswith("echo")]
        call = {"id": "1", "function": {"name": name, "arguments": {"text": "hi"}}}
        answer = (await client("POST", f"/v1/sessions/{session['id']}/calls", {"tool_calls": [call]})).json()
    assert answer["results"][0]["outcome"] == "ok"
    assert len(chains[0]) + AROUND <= 15, "\n".join(reversed(chains[0]))
