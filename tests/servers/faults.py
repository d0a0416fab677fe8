"""Each tool is one way in which a server can be wrong, beside a few that are right.

A name may carry a tail after `-` (`echo-grown1`): another tool in the listing, which behaves as the one before the `-`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import parts

if TYPE_CHECKING:
    from protocol import Connection, Say

MEGABYTE = 1024 * 1024
GRANDCHILD_LIFE_S = 120


@dataclass(frozen=True, eq=False)
class Call:
    """One request, and the ways to answer it."""

    id: Any
    params: dict[str, Any]
    connection: Connection
    say: Say

    def argument(self, name: str, default: Any) -> Any:
        return (self.params.get("arguments") or {}).get(name, default)

    async def result(self, **result: Any) -> None:
        await self.say(json.dumps({"jsonrpc": "2.0", "id": self.id, "result": result}))

    async def refuse(self, code: int, message: str) -> None:
        await self.say(json.dumps({"jsonrpc": "2.0", "id": self.id, "error": {"code": code, "message": message}}))

    async def content(self, *content: Any, **more: Any) -> None:
        await self.result(content=list(content), **more)

    async def progress(self, done: float, total: float) -> None:
        """Only a client that sent a token wants to hear of progress."""
        token = (self.params.get("_meta") or {}).get("progressToken")
        if token is not None:
            told = {"progressToken": token, "progress": done, "total": total}
            await self.say(json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": told}))


@dataclass(frozen=True)
class Tool:
    run: Callable[[Call], Awaitable[None]]
    properties: dict[str, Any]
    more: dict[str, Any]

    def listing(self, name: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": self.properties}
        return {"name": name, "description": self.run.__doc__, "inputSchema": schema, **self.more}


TOOLS: dict[str, Tool] = {}
STRING, NUMBER, INTEGER, FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))


def tool(
    more: dict[str, Any] | None = None, **properties: Any
) -> Callable[[Callable[[Call], Awaitable[None]]], Callable[[Call], Awaitable[None]]]:
    def add(run: Callable[[Call], Awaitable[None]]) -> Callable[[Call], Awaitable[None]]:
        TOOLS[run.__name__] = Tool(run, properties, more or {})
        return run

    return add


@tool(text=STRING)
async def echo(call: Call) -> None:
    """Answers with its text."""
    await call.content(parts.text(call.argument("text", "")))


@tool()
async def hang(call: Call) -> None:
    """Says that it has begun, and never answers."""
    await call.progress(0, 1)
    await asyncio.Event().wait()


@tool(seconds=NUMBER)
async def slow(call: Call) -> None:
    """Answers after some seconds, and reports progress at the start and at the end."""
    await call.progress(0, 1)
    await asyncio.sleep(call.argument("seconds", 1.0))
    await call.progress(1, 1)
    await call.content(parts.text("at last"))


@tool(code=INTEGER)
async def crash(call: Call) -> None:
    """Ends the server's process in the middle of the call, with a last word on standard error."""
    sys.stderr.write("misbehaving: fatal: told to crash\n")
    sys.stderr.flush()
    os._exit(call.argument("code", 3))


@tool(answer=FLAG)
async def garbage(call: Call) -> None:
    """Says something that is not JSON, then answers, or does not."""
    await call.say("Traceback (most recent call last): {garbage")
    if not call.argument("answer", True):
        await asyncio.Event().wait()
    await call.content(parts.text("after the garbage"))


@tool(mb=NUMBER)
async def huge(call: Call) -> None:
    """Answers with that many megabytes of text."""
    await call.content(parts.text("x" * int(call.argument("mb", 1) * MEGABYTE)))


@tool()
async def wrong_id(call: Call) -> None:
    """Answers with an id that nobody asked with, and then no more."""
    result = {"content": [parts.text("for somebody else")]}
    await call.say(json.dumps({"jsonrpc": "2.0", "id": "nobody-asked", "result": result}))
    await asyncio.Event().wait()


@tool()
async def twice(call: Call) -> None:
    """Answers twice, differently."""
    await call.content(parts.text("first"))
    await call.content(parts.text("second"))


@tool(message=STRING)
async def fail(call: Call) -> None:
    """Answers that it failed."""
    await call.content(parts.text(call.argument("message", "the tool failed")), isError=True)


@tool(code=INTEGER, message=STRING)
async def rpc_error(call: Call) -> None:
    """Answers with a JSON-RPC error."""
    await call.refuse(call.argument("code", -32603), call.argument("message", "the server failed"))


@tool(how={"enum": ["is_error", "rpc_error"]})
async def flaky(call: Call) -> None:
    """Fails on each second call to this server."""
    call.connection.shared.flaky_calls += 1
    if call.connection.shared.flaky_calls % 2:
        await call.content(parts.text("worked"))
    elif call.argument("how", "is_error") == "is_error":
        await call.content(parts.text("the second call fails"), isError=True)
    else:
        await call.refuse(-32603, "the second call fails")


@tool(kind={"enum": list(parts.BAD_RESULTS)})
async def bad_content(call: Call) -> None:
    """Answers with a result that the protocol does not allow."""
    await call.result(**parts.BAD_RESULTS[call.argument("kind", "unknown_type")])


@tool(width=INTEGER, height=INTEGER)
async def image(call: Call) -> None:
    """Answers with a black PNG of that size."""
    await call.content(parts.image(call.argument("width", 4), call.argument("height", 4)))


@tool()
async def audio(call: Call) -> None:
    """Answers with a short WAV."""
    await call.content(parts.audio())


@tool(blob=FLAG)
async def resource(call: Call) -> None:
    """Answers with an embedded resource, of text or of bytes."""
    await call.content(parts.blob_resource() if call.argument("blob", False) else parts.text_resource())


@tool()
async def link(call: Call) -> None:
    """Answers with a link to a resource."""
    await call.content(parts.link())


@tool({"outputSchema": {"type": "object", "properties": {"sum": NUMBER}, "required": ["sum"]}}, a=NUMBER, b=NUMBER)
async def structured(call: Call) -> None:
    """Adds two numbers; the answer is structured, and its text is the same JSON."""
    answer = {"sum": call.argument("a", 0) + call.argument("b", 0)}
    await call.content(parts.text(json.dumps(answer)), structuredContent=answer)


@tool()
async def mixed(call: Call) -> None:
    """Answers with one part of each kind, text first and last."""
    middle = (parts.image(4, 4), parts.audio(), parts.text_resource(), parts.link())
    await call.content(parts.text("before"), *middle, parts.text("after"))


@tool()
async def count(call: Call) -> None:
    """Counts its calls on this connection."""
    call.connection.count += 1
    await call.content(parts.text(str(call.connection.count)))


@tool()
async def pid(call: Call) -> None:
    """Answers with the server's process id."""
    await call.content(parts.text(str(os.getpid())))


@tool()
async def grow(call: Call) -> None:
    """Adds the tool `echo-grownN`, and says that the list has changed."""
    shared = call.connection.shared
    shared.grown += 1
    await shared.announce("notifications/tools/list_changed")
    await call.content(parts.text(f"echo-grown{shared.grown}"))


@tool(method=STRING)
async def ask(call: Call) -> None:
    """Asks the client back, and answers with what it said."""
    question = f"question-{os.urandom(4).hex()}"
    answer = call.connection.asked[question] = asyncio.get_running_loop().create_future()
    method = call.argument("method", "roots/list")
    await call.say(json.dumps({"jsonrpc": "2.0", "id": question, "method": method, "params": {}}))
    said = await answer
    await call.content(parts.text(json.dumps(said.get("result", said.get("error")))))


@tool()
async def was_cancelled(call: Call) -> None:
    """Answers with the ids and the tools of all requests that clients cancelled."""
    seen = call.connection.shared.cancelled
    answer = {"ids": [one["id"] for one in seen], "tools": [one["tool"] for one in seen]}
    await call.content(parts.text(json.dumps(answer)), structuredContent=answer)


@tool()
async def spawn_grandchild(call: Call) -> None:
    """Starts a process which outlives the server unless its group is ended; answers with its process id."""
    sleeper = [sys.executable, "-c", f"import time; time.sleep({GRANDCHILD_LIFE_S})"]
    nothing = asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*sleeper, stdin=nothing, stdout=nothing, stderr=nothing)
    await call.content(parts.text(str(child.pid)))
