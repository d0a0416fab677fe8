"""The same connections over HTTP: the older SSE pair of endpoints, or the one streamable endpoint."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from threading import Thread

import uvicorn
from protocol import Connection, Flags, Shared
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

Frames = asyncio.Queue[str | None]
"""Frames on their way to a client; None is the end of the stream."""


class Line(Connection):
    """A connection whose unasked-for frames wait until the client opens a stream for them."""

    def __init__(self, shared: Shared) -> None:
        self.frames: Frames = asyncio.Queue()
        super().__init__(shared=shared, say=self.frames.put)


async def events(frames: Frames, first: str = "") -> AsyncIterator[str]:
    yield first or ": open\n\n"
    while (frame := await frames.get()) is not None:
        yield f"event: message\ndata: {frame}\n\n"


def event_stream(frames: Frames, first: str = "") -> Response:
    return StreamingResponse(events(frames, first), media_type="text/event-stream")


class Web:
    """The endpoints of both HTTP transports, and the sessions which are open on them."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.shared = Shared(flags)
        self.lines: dict[str, Line] = {}

    def app(self) -> ASGIApp:
        sse = [Route("/sse", self.open_sse, methods=["GET"]), Route("/messages", self.post_sse, methods=["POST"])]
        http = [
            Route("/mcp", self.post, methods=["POST"]),
            Route("/mcp", self.listen, methods=["GET"]),
            Route("/mcp", self.end, methods=["DELETE"]),
        ]
        app = Starlette(routes=sse if self.flags.transport == "sse" else http)
        return guarded(app, self.flags.require_token) if self.flags.require_token else app

    async def open_sse(self, request: Request) -> Response:
        session, line = uuid.uuid4().hex, Line(self.shared)
        self.lines[session] = line
        return event_stream(line.frames, f"event: endpoint\ndata: /messages?session={session}\n\n")

    async def post_sse(self, request: Request) -> Response:
        line = self.lines.get(request.query_params.get("session", ""))
        if line is None:
            return PlainTextResponse("no such session", status_code=404)
        line.receive(await request.json(), line.say)
        return Response(status_code=202)

    async def post(self, request: Request) -> Response:
        message = await request.json()
        session = request.headers.get("mcp-session-id", "")
        if message.get("method") == "initialize":
            session = uuid.uuid4().hex
            self.lines[session] = Line(self.shared)
        line = self.lines.get(session) or (None if session else Line(self.shared))
        if line is None:
            return PlainTextResponse("no such session", status_code=404)
        frames: Frames = asyncio.Queue()
        task = line.receive(message, frames.put)
        if task is None:
            return Response(status_code=202)
        task.add_done_callback(lambda _: frames.put_nowait(None))
        response = await self.answer(frames)
        if session:
            response.headers["mcp-session-id"] = session
        return response

    async def answer(self, frames: Frames) -> Response:
        if not self.flags.json_answers:
            return event_stream(frames)
        frame = await frames.get()
        while frame and frame.startswith('{"jsonrpc": "2.0", "method"'):
            frame = await frames.get()  # one body has no place for notifications
        return Response(frame or "", media_type="application/json")

    async def listen(self, request: Request) -> Response:
        line = self.lines.get(request.headers.get("mcp-session-id", ""))
        return event_stream(line.frames) if line else PlainTextResponse("no such session", status_code=404)

    async def end(self, request: Request) -> Response:
        line = self.lines.pop(request.headers.get("mcp-session-id", ""), None)
        if line is not None:
            self.shared.connections.remove(line)
            await line.frames.put(None)
        return Response(status_code=200 if line else 404)


def guarded(app: ASGIApp, token: str) -> ASGIApp:
    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        sent = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] != "http" or hmac.compare_digest(sent, b"Bearer " + token.encode()):
            await app(scope, receive, send)
        else:
            challenge = {"WWW-Authenticate": 'Bearer realm="misbehaving", error="invalid_token"'}
            await JSONResponse({"error": "invalid_token"}, 401, headers=challenge)(scope, receive, send)

    return guard


def leave_with_parent() -> None:
    """A test run that was killed cannot end its servers, so they look after themselves."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


class Unheeding(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Or SIGTERM would be heard, whatever was said of it before."""
        return nullcontext()


async def serve_web(flags: Flags) -> None:
    listener = socket.create_server(("127.0.0.1", flags.listen_port))
    path = "sse" if flags.transport == "sse" else "mcp"
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}/{path}\n")
    sys.stdout.flush()
    Thread(target=leave_with_parent, daemon=True).start()
    config = uvicorn.Config(Web(flags).app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    server = Unheeding(config) if flags.ignore_term else uvicorn.Server(config)
    await server.serve(sockets=[listener])
