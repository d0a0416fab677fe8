"""A gateway for tests of its web UI, with tools of many schema features and a server that is down."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from gateway.config.models import Limits, Server
from gateway.gateway import Gateway
from gateway.limits import LimitedToolset
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.transport import Services
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from tests.servers.start_server import free_port
from tests.toolset_conformance.sample_tools import sample_sources

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
REMEDY = "python far.py"
CHATTY_SERVER = Path(__file__).parents[1] / "servers" / "chatty_server.py"

PLAN_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "description": "What it is called."},
        "rounds": {"type": "integer", "minimum": 1, "default": 3},
        "share": {"type": "number"},
        "loud": {"type": "boolean"},
        "colour": {"enum": ["red", "blue", 7]},
        "stops": {"type": "array", "items": {"type": "string"}},
        "place": {"$ref": "#/$defs/Place"},
        "tree": {"$ref": "#/$defs/Node"},
        "who": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"$ref": "#/$defs/Place"}]},
        "free": {},
    },
    "required": ["title", "place"],
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "code": {"type": ["integer", "null"]}},
            "required": ["city"],
        },
        "Node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["name"],
        },
    },
}


def plan(**arguments: Any) -> Any:
    """Makes a plan."""
    return arguments


def echo(text: str) -> str:
    return text


class BlockingTool:
    """A tool that ends when the test sets an event."""

    def __init__(self) -> None:
        self.go = threading.Event()

    async def wait(self) -> str:
        """Takes its time."""
        while not self.go.is_set():  # noqa: ASYNC110 - the test runs in another thread
            await anyio.sleep(0.01)
        return "done"


def far_server(services: Services) -> McpToolset:
    """A server that is down."""
    far = Server(url=f"http://127.0.0.1:{free_port()}/mcp", start=REMEDY, optional=True)
    return McpToolset("far", far, services=services)


def sample_gateway_with_servers() -> Gateway:
    """Native tools, a server that writes hostile text to standard error, and one that is down."""
    services = Services()
    config = Server(command=sys.executable, args=(str(CHATTY_SERVER), HOSTILE))
    chatty, down = McpToolset("chatty", config, services=services), far_server(services)
    return Gateway(
        [
            *sample_sources(),
            Source("chatty", LimitedToolset(chatty, Limits(timeout_s=60)), backend=chatty, trusted=False),
            Source("far", down, backend=down, trusted=False),
        ],
        services=services,
    )


def sample_gateway(slow: BlockingTool) -> Gateway:
    services = Services()
    tools = [
        FunctionTool(plan, parameters=PLAN_SCHEMA, owner="shop"),
        FunctionTool(echo, name="hostile", description=HOSTILE, owner=f"shop {HOSTILE}"),
        FunctionTool(slow.wait, owner="shop"),
    ]
    down = far_server(services)
    return Gateway(
        [
            *sample_sources(),
            Source("shop", LimitedToolset(NativeToolset(tools), Limits(timeout_s=60))),
            Source("far", down, backend=down, trusted=False),
        ],
        services=services,
    )
