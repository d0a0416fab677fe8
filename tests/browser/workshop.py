"""A gateway for the tests of its page: tools whose schemas have something of everything, and a server that is down."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import anyio

from gateway.config.models import Limits, Server
from gateway.gateway import Gateway
from gateway.limit import Limited
from gateway.native.function import FunctionTool
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.upstream.server import McpToolset
from gateway.upstream.services import Services
from tests.doors.kit import sources
from tests.servers.start import free_port

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
REMEDY = "python far.py"

PLAN: Mapping[str, Any] = {
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


def plan(**given: Any) -> Any:
    """Makes a plan."""
    return given


def echo(text: str) -> str:
    return text


class Slow:
    """A tool that ends when the test wants it to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    async def wait(self) -> str:
        """Takes its time."""
        while not self.go.is_set():  # noqa: ASYNC110 - the test is another thread, which has no event of ours to set
            await anyio.sleep(0.01)
        return "done"


def workshop(slow: Slow) -> Gateway:
    services = Services()
    far = Server(url=f"http://127.0.0.1:{free_port()}/mcp", start=REMEDY, optional=True, connect_timeout_s=5)
    tools = [
        FunctionTool(plan, parameters=PLAN, owner="shop"),
        FunctionTool(echo, name="hostile", description=HOSTILE, owner=f"shop {HOSTILE}"),
        FunctionTool(slow.wait, owner="shop"),
    ]
    down = McpToolset("far", far, services=services)
    return Gateway(
        [
            *sources(),
            Source("shop", Limited(NativeToolset(tools), Limits(timeout_s=60))),
            Source("far", down, leaf=down, ours=False),
        ],
        services=services,
    )
