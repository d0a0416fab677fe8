"""JSON-RPC is small: a connection takes messages and says frames, whichever transport carries them."""

from __future__ import annotations

import argparse
import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from faults import TOOLS, Call
from listings import page

VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32601, -32602, -32603
GARBAGE = "Loading model weights... 100% {not json"

Say = Callable[[str], Awaitable[None]]
"""Puts one frame on the wire as it is."""


class Flags(argparse.Namespace):
    transport: str
    listen_port: int
    require_token: str
    json_answers: bool
    never_answer: bool
    exit_at_once: int | None
    garbage_first: bool
    bad_tools: bool
    schema_depth: int
    schema_mb: float
    pages: int
    endless_pages: bool
    ignore_term: bool


@dataclass(eq=False)
class Shared:
    """What all connections of the process see."""

    flags: Flags
    connections: list[Connection] = field(default_factory=list)
    cancelled: list[dict[str, Any]] = field(default_factory=list)
    grown: int = 0
    flaky_calls: int = 0

    async def announce(self, method: str) -> None:
        for connection in self.connections:
            await connection.say(json.dumps({"jsonrpc": "2.0", "method": method}))


@dataclass(eq=False)
class Connection:
    """One client: its counter, and its requests under way."""

    shared: Shared
    say: Say
    count: int = 0
    spoken: bool = False
    running: dict[Any, asyncio.Task[None]] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)
    asked: dict[Any, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shared.connections.append(self)

    def receive(self, message: dict[str, Any], say: Say) -> asyncio.Task[None] | None:
        """Starts to answer a request through `say`; a notification or an answer starts nothing."""
        if "method" in message and "id" in message:
            task = asyncio.create_task(self._answer(message, say))
            self.running[message["id"]] = task
            self.names[message["id"]] = message.get("params", {}).get("name", message["method"])
            task.add_done_callback(lambda _: self.running.pop(message["id"], None))
            return task
        if "method" not in message and message.get("id") in self.asked:
            self.asked.pop(message["id"]).set_result(message)
        if message.get("method") == "notifications/cancelled":
            request = message["params"]["requestId"]
            self.shared.cancelled.append({"id": request, "tool": self.names.get(request)})
            if request in self.running:
                self.running[request].cancel()
        return None

    async def _answer(self, message: dict[str, Any], say: Say) -> None:
        flags = self.shared.flags
        if flags.garbage_first and not self.spoken:
            self.spoken = True
            await say(GARBAGE)
        if flags.never_answer:
            await asyncio.Event().wait()
        params = message.get("params") or {}
        call = Call(id=message["id"], params=params, connection=self, say=say)
        try:
            await self._dispatch(message["method"], call)
        except Exception as error:  # a mistake of this file must show as such, not as one more hanging call
            traceback.print_exc()
            await call.refuse(INTERNAL_ERROR, f"the misbehaving server is wrong by mistake: {error!r}")

    async def _dispatch(self, method: str, call: Call) -> None:
        match method:
            case "initialize":
                wanted = call.params.get("protocolVersion")
                await call.result(
                    protocolVersion=wanted if wanted in VERSIONS else VERSIONS[-1],
                    capabilities={"tools": {"listChanged": True}},
                    serverInfo={"name": "misbehaving", "version": "1.0.0"},
                    instructions="Every tool does what its description says.",
                )
            case "ping":
                await call.result()
            case "tools/list":
                await call.result(**page(TOOLS, self.shared, call.params.get("cursor")))
            case "tools/call" if tool := TOOLS.get(str(call.params.get("name")).split("-")[0]):
                await tool.run(call)
            case "tools/call":
                await call.refuse(INVALID_PARAMS, f"Unknown tool: {call.params.get('name')}")
            case _:
                await call.refuse(METHOD_NOT_FOUND, f"Method not found: {method}")
