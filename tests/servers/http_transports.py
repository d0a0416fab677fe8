"""The HTTP transports of the misbehaving server: the two endpoints of HTTP+SSE, or the one of streamable HTTP."""

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
"""Frames to send to a client; None ends the stream."""


class HttpConnection(Connection):
    """A connection whose notifications wait in a queue until the client opens a stream for them."""

    def __init__(self, shared: Shared) -> None:
        self.frames: Frames = asyncio.Queue()
        super().__init__(shared=shared, send=self.frames.put)


async def events(frames: Frames, first: str = "") -> AsyncIterator[str]:
    yield first or ": open\n\n"
    while (frame := await frames.get()) is not None:
        yield f"event: message\ndata: {frame}\n\n"


def event_stream(frames: Frames, first: str = "") -> Response:
    return StreamingResponse(events(frames, first), media_type="text/event-stream")


class HttpEndpoints:
    """The endpoints of both HTTP transports, and the open sessions."""

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self.shared = Shared(flags)
        self.connections: dict[str, HttpConnection] = {}

    def app(self) -> ASGIApp:
        sse = [Route("/sse", self.open_sse, methods=["GET"]), Route("/messages", self.post_sse, methods=["POST"])]
        http = [
            Route("/mcp", self.post, methods=["POST"]),
            Route("/mcp", self.listen, methods=["GET"]),
            Route("/mcp", self.end, methods=["DELETE"]),
        ]
        app = Starlette(routes=sse if self.flags.transport == "sse" else http)
        return require_token(app, self.flags.require_token) if self.flags.require_token else app

    async def open_sse(self, request: Request) -> Response:
        session, connection = uuid.uuid4().hex, HttpConnection(self.shared)
        self.connections[session] = connection
        return event_stream(connection.frames, f"event: endpoint\ndata: /messages?session={session}\n\n")

    async def post_sse(self, request: Request) -> Response:
        connection = self.connections.get(request.query_params.get("session", ""))
        if connection is None:
            return PlainTextResponse("no such session", status_code=404)
        connection.receive(await request.json(), connection.send)
        return Response(status_code=202)

    async def post(self, request: Request) -> Response:
        message = await request.json()
        session = request.headers.get("mcp-session-id", "")
        if message.get("method") == "initialize":
            session = uuid.uuid4().hex
            self.connections[session] = HttpConnection(self.shared)
        connection = self.connections.get(session) or (None if session else HttpConnection(self.shared))
        if connection is None:
            return PlainTextResponse("no such session", status_code=404)
        frames: Frames = asyncio.Queue()
        task = connection.receive(message, frames.put)
        if task is None:
            return Response(status_code=202)
        task.add_done_callback(lambda _: frames.put_nowait(None))
        response = event_stream(frames)
        if session:
            response.headers["mcp-session-id"] = session
        return response

    async def listen(self, request: Request) -> Response:
        connection = self.connections.get(request.headers.get("mcp-session-id", ""))
        return event_stream(connection.frames) if connection else PlainTextResponse("no such session", status_code=404)

    async def end(self, request: Request) -> Response:
        connection = self.connections.pop(request.headers.get("mcp-session-id", ""), None)
        if connection is not None:
            self.shared.connections.remove(connection)
            await connection.frames.put(None)
        return Response(status_code=200 if connection else 404)


def require_token(app: ASGIApp, token: str) -> ASGIApp:
    async def check_token(scope: Scope, receive: Receive, send: Send) -> None:
        authorization = dict(scope.get("headers", [])).get(b"authorization", b"")
        if scope["type"] != "http" or hmac.compare_digest(authorization, b"Bearer " + token.encode()):
            await app(scope, receive, send)
        else:
            challenge = {"WWW-Authenticate": 'Bearer realm="misbehaving", error="invalid_token"'}
            await JSONResponse({"error": "invalid_token"}, 401, headers=challenge)(scope, receive, send)

    return check_token


def exit_with_parent() -> None:
    """Ends the process when its parent dies, because a killed test run cannot stop its servers."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


class SignalIgnoringServer(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Installs no handlers, so that SIGTERM stays ignored."""
        return nullcontext()


async def serve_web(flags: Flags) -> None:
    listener = socket.create_server(("127.0.0.1", flags.listen_port))
    path = "sse" if flags.transport == "sse" else "mcp"
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}/{path}\n")
    sys.stdout.flush()
    Thread(target=exit_with_parent, daemon=True).start()
    config = uvicorn.Config(
        HttpEndpoints(flags).app(), log_level="warning", lifespan="off", timeout_graceful_shutdown=1
    )
    server = SignalIgnoringServer(config) if flags.ignore_term else uvicorn.Server(config)
    await server.serve(sockets=[listener])
