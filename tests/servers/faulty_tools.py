"""The misbehaving server's tools: each has one fault, and a few are correct.

A tool's name may have a suffix after `-` (`echo-grown1`); it behaves like the tool named before the `-`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protocol import Connection, Send

MEGABYTE = 1024 * 1024
GRANDCHILD_LIFE_S = 120


@dataclass(frozen=True, eq=False)
class Call:
    """One request, with methods to answer it."""

    id: Any
    params: dict[str, Any]
    connection: Connection
    send: Send

    def argument(self, name: str, default: Any) -> Any:
        return (self.params.get("arguments") or {}).get(name, default)

    async def result(self, **result: Any) -> None:
        await self.send(json.dumps({"jsonrpc": "2.0", "id": self.id, "result": result}))

    async def error(self, code: int, message: str) -> None:
        await self.send(json.dumps({"jsonrpc": "2.0", "id": self.id, "error": {"code": code, "message": message}}))

    async def content(self, *content: Any, **more: Any) -> None:
        await self.result(content=list(content), **more)

    async def progress(self, done: float, total: float) -> None:
        """Reports progress, if the client sent a progress token."""
        token = (self.params.get("_meta") or {}).get("progressToken")
        if token is not None:
            params = {"progressToken": token, "progress": done, "total": total}
            await self.send(json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}))


@dataclass(frozen=True)
class Tool:
    run: Callable[[Call], Awaitable[None]]
    properties: dict[str, Any]

    def listing(self, name: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": self.properties}
        return {"name": name, "description": self.run.__doc__, "inputSchema": schema}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


TOOLS: dict[str, Tool] = {}
STRING, NUMBER, INTEGER = ({"type": kind} for kind in ("string", "number", "integer"))


def tool(**properties: Any) -> Callable[[Callable[[Call], Awaitable[None]]], Callable[[Call], Awaitable[None]]]:
    def register(run: Callable[[Call], Awaitable[None]]) -> Callable[[Call], Awaitable[None]]:
        TOOLS[run.__name__] = Tool(run, properties)
        return run

    return register


@tool(text=STRING)
async def echo(call: Call) -> None:
    """Answers with its text."""
    await call.content(text(call.argument("text", "")))


@tool()
async def hang(call: Call) -> None:
    """Reports that it has started, and never answers."""
    await call.progress(0, 1)
    await asyncio.Event().wait()


@tool(seconds=NUMBER)
async def slow(call: Call) -> None:
    """Answers after some seconds, and reports progress at the start and at the end."""
    await call.progress(0, 1)
    await asyncio.sleep(call.argument("seconds", 1.0))
    await call.progress(1, 1)
    await call.content(text("at last"))


@tool(seconds=NUMBER)
async def block(call: Call) -> None:
    """Blocks the whole server, as a synchronous function does."""
    time.sleep(call.argument("seconds", 1.0))  # noqa: ASYNC251
    await call.content(text("awake"))


@tool(code=INTEGER)
async def crash(call: Call) -> None:
    """Ends the server's process in the middle of the call, with a message on standard error."""
    sys.stderr.write("misbehaving: fatal: told to crash\n")
    sys.stderr.flush()
    os._exit(call.argument("code", 3))


@tool()
async def garbage(call: Call) -> None:
    """Sends something that is not JSON, then answers."""
    await call.send("Traceback (most recent call last): {garbage")
    await call.content(text("after the garbage"))


@tool(mb=NUMBER)
async def huge(call: Call) -> None:
    """Answers with that many megabytes of text."""
    await call.content(text("x" * int(call.argument("mb", 1) * MEGABYTE)))


@tool()
async def fail(call: Call) -> None:
    """Answers that it failed."""
    await call.content(text("the tool failed"), isError=True)


@tool()
async def rpc_error(call: Call) -> None:
    """Answers with a JSON-RPC error."""
    await call.error(-32603, "the server failed")


@tool()
async def bad_content(call: Call) -> None:
    """Answers with a part that the protocol does not have."""
    await call.content(text("known"), {"type": "hologram", "data": "?"})


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = {"type": "image", "data": PNG, "mimeType": "image/png"}
MIDDLE = (
    IMAGE,
    {"type": "audio", "data": "UklGRgAAAABXQVZF", "mimeType": "audio/wav"},
    {"type": "resource", "resource": {"uri": "note://1", "mimeType": "text/plain", "text": "the text of a note"}},
    {"type": "resource_link", "uri": "note://3", "name": "a note", "mimeType": "text/plain"},
)


@tool()
async def image(call: Call) -> None:
    """Answers with a picture."""
    await call.content(IMAGE)


@tool()
async def mixed(call: Call) -> None:
    """Answers with one part of each kind, text first and last."""
    await call.content(text("before"), *MIDDLE, text("after"))


@tool()
async def count(call: Call) -> None:
    """Counts its calls on this connection."""
    call.connection.count += 1
    await call.content(text(str(call.connection.count)))


@tool()
async def pid(call: Call) -> None:
    """Answers with the server's process id."""
    await call.content(text(str(os.getpid())))


@tool()
async def grow(call: Call) -> None:
    """Adds the tool `echo-grownN`, and announces that the list has changed."""
    shared = call.connection.shared
    shared.grown += 1
    await shared.announce("notifications/tools/list_changed")
    await call.content(text(f"echo-grown{shared.grown}"))


@tool(method=STRING)
async def ask(call: Call) -> None:
    """Sends a request to the client, and answers with the response."""
    request_id = f"request-{os.urandom(4).hex()}"
    future = call.connection.server_requests[request_id] = asyncio.get_running_loop().create_future()
    method = call.argument("method", "roots/list")
    await call.send(json.dumps({"jsonrpc": "2.0", "id": request_id, "method": method, "params": {}}))
    response = await future
    await call.content(text(json.dumps(response.get("result", response.get("error")))))


@tool()
async def was_cancelled(call: Call) -> None:
    """Answers with the tools of all requests that clients cancelled."""
    answer = {"tools": call.connection.shared.cancelled}
    await call.content(text(json.dumps(answer)), structuredContent=answer)


@tool()
async def spawn_grandchild(call: Call) -> None:
    """Starts a process that outlives the server unless its process group is killed; answers with its process id."""
    sleeper = [sys.executable, "-c", f"import time; time.sleep({GRANDCHILD_LIFE_S})"]
    devnull = asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*sleeper, stdin=devnull, stdout=devnull, stderr=devnull)
    await call.content(text(str(child.pid)))


DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
os.close(1)
time.sleep(float(sys.argv[1]))
"""
"""A program that leaves its parent, its session and its process group, as daemons do."""


@tool()
async def spawn_daemons(call: Call) -> None:
    """Starts four daemons with an empty environment; answers with their process ids."""
    pids = []
    for _ in range(4):
        command = [sys.executable, "-I", "-S", "-c", DAEMON, str(GRANDCHILD_LIFE_S)]
        daemon = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env={})
        assert daemon.stdout is not None
        pids.append(int(await daemon.stdout.readline()))
        await daemon.wait()
    await call.content(text(json.dumps(pids)))
