"""Tests of a server's resources and prompts as tools of the policy, with a real server."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import anyio

from gateway.gateway import Gateway
from gateway.types import Image, Outcome, ToolCall
from tests.conftest import Write
from tests.sample_images import png
from tests.servers.forked_server import forked_command

SERVER = """
import base64
import sys
from mcp.server import MCPServer

server = MCPServer("library")

@server.tool()
def lend(title: str) -> str:
    return title

@server.resource("note://first", mime_type="text/plain", description="The first note. " + "x" * 300)
def first() -> str:
    return "Buy milk."

@server.resource("note://picture", mime_type="image/png")
def picture() -> bytes:
    return base64.b64decode(sys.argv[1])

for number in range(250):
    server.resource(f"many://{number}", name=f"many {number}")(lambda: "one of many")

@server.prompt(description="Asks for a summary.")
def summarize(text: str, style: str = "short") -> str:
    return f"Summarize in a {style} way: {text}"

server.run("stdio")
"""


def _write_server(write: Write, **settings: str) -> Path:
    write("library.py", SERVER)
    picture = base64.b64encode(png(4, 3)).decode()
    command, args = forked_command("library.py", picture)
    server = {"command": command, "args": args, "cwd": ".", **settings}
    return write("servers.json", json.dumps({"mcpServers": {"my library": server}}))


async def test_policy_lists_and_reads_resources_and_prompts(write: Write) -> None:
    file = _write_server(write, resources="tools", prompts="tools")
    calls = {
        "list": ("my_library_list_resources", "{}"),
        "read": ("my_library_read_resource", '{"uri": "note://first"}'),
        "see": ("my_library_read_resource", '{"uri": "note://picture"}'),
        "gone": ("my_library_read_resource", '{"uri": "note://gone"}'),
        "wrong": ("my_library_read_resource", "{}"),
        "prompts": ("my_library_list_prompts", "{}"),
        "get": ("my_library_get_prompt", '{"name": "summarize", "arguments": {"text": "abc"}}'),
        "own": ("lend", '{"title": "Emma"}'),
    }
    with anyio.fail_after(60):
        async with Gateway.load(None, file) as gateway, gateway.open() as session:
            answers = await session.calls([ToolCall(key, *call) for key, call in calls.items()])
    results = dict(zip(calls, answers, strict=True))
    lines = results["list"].text.splitlines()
    assert lines[0].startswith("note://first [text/plain]: first. The first note. xxx")
    assert len(lines[0]) < 300
    assert len(lines) == 201
    assert lines[-1] in ("52 more are not shown.", "There are more, which are not shown.")
    assert results["read"].text == "Buy milk."
    assert [type(part) for part in results["see"].parts] == [Image]
    assert results["gone"].outcome is Outcome.ERROR
    assert results["wrong"].outcome is Outcome.INVALID
    assert results["prompts"].text.startswith("summarize (arguments: text, style (optional)): Asks for a summary.")
    assert results["get"].text == "user: Summarize in a short way: abc"
    assert results["own"].text == "Emma"
