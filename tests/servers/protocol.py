"""The JSON-RPC part of the misbehaving server: connections, requests and their dispatch, without a transport."""

from __future__ import annotations

import argparse
import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from bad_listings import build_page
from faulty_tools import TOOLS, Call

VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32601, -32602, -32603

Send = Callable[[str], Awaitable[None]]
"""Sends one frame unchanged."""


class Flags(argparse.Namespace):
    transport: str
    listen_port: int
    require_token: str
    never_answer: bool
    bad_tools: bool
    pages: int
    endless_pages: bool
    ignore_term: bool
    ignore_pings: bool


@dataclass(eq=False)
class Shared:
    """State shared by all connections of the process."""

    flags: Flags
    connections: list[Connection] = field(default_factory=list)
    cancelled: list[str | None] = field(default_factory=list)
    grown: int = 0

    async def announce(self, method: str) -> None:
        for connection in self.connections:
            await connection.send(json.dumps({"jsonrpc": "2.0", "method": method}))


@dataclass(eq=False)
class Connection:
    """One client: its call counter and its requests under way."""

    shared: Shared
    send: Send
    count: int = 0
    running: dict[Any, asyncio.Task[None]] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)
    server_requests: dict[Any, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shared.connections.append(self)

    def receive(self, message: dict[str, Any], send: Send) -> asyncio.Task[None] | None:
        """Starts a task that answers a request through `send`; notifications and responses start none."""
        if "method" in message and "id" in message:
            task = asyncio.create_task(self._answer(message, send))
            self.running[message["id"]] = task
            self.names[message["id"]] = message.get("params", {}).get("name", message["method"])
            task.add_done_callback(lambda _: self.running.pop(message["id"], None))
            return task
        if "method" not in message and message.get("id") in self.server_requests:
            self.server_requests.pop(message["id"]).set_result(message)
        if message.get("method") == "notifications/cancelled":
            request = message["params"]["requestId"]
            self.shared.cancelled.append(self.names.get(request))
            if request in self.running:
                self.running[request].cancel()
        return None

    async def _answer(self, message: dict[str, Any], send: Send) -> None:
        if self.shared.flags.never_answer:
            await asyncio.Event().wait()
        params = message.get("params") or {}
        call = Call(id=message["id"], params=params, connection=self, send=send)
        try:
            await self._dispatch(message["method"], call)
        except Exception as error:  # a bug in this server must not look like one more hanging call
            traceback.print_exc()
            await call.error(INTERNAL_ERROR, f"bug in the misbehaving server: {error!r}")

    async def _dispatch(self, method: str, call: Call) -> None:
        match method:
            case "initialize":
                requested = call.params.get("protocolVersion")
                await call.result(
                    protocolVersion=requested if requested in VERSIONS else VERSIONS[-1],
                    capabilities={"tools": {"listChanged": True}},
                    serverInfo={"name": "misbehaving", "version": "1.0.0"},
                    instructions="Every tool does what its description says.",
                )
            case "ping" if not self.shared.flags.ignore_pings:
                await call.result()
            case "ping":
                await asyncio.Event().wait()
            case "tools/list":
                await call.result(**build_page(TOOLS, self.shared, call.params.get("cursor")))
            case "tools/call" if tool := TOOLS.get(str(call.params.get("name")).split("-")[0]):
                await tool.run(call)
            case "tools/call":
                await call.error(INVALID_PARAMS, f"Unknown tool: {call.params.get('name')}")
            case _:
                await call.error(METHOD_NOT_FOUND, f"Method not found: {method}")
