"""An OpenAI-compatible chat endpoint whose responses a test chooses."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Responder = Callable[[int, dict[str, Any]], Response]


class ChatServer:
    """A chat endpoint whose responses a test chooses."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.respond: Responder = lambda count, body: completion("Thanks.")
        self.release = threading.Event()
        self.url = ""

    async def __call__(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        return await anyio.to_thread.run_sync(self.respond, len(self.requests), self.requests[-1])


def completion(text: Any) -> Response:
    return JSONResponse({"choices": [{"message": {"role": "assistant", "content": text}}]})


@contextmanager
def serve_chat() -> Iterator[ChatServer]:
    """Serves it over HTTP on a free port."""
    endpoint = ChatServer()
    app = Starlette(routes=[Route("/v1/chat/completions", endpoint.__call__, methods=["POST"])])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)  # Early connections wait for the server.
        endpoint.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield endpoint
        finally:
            endpoint.release.set()
            server.should_exit = True
            thread.join(10)
