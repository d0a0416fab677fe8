"""An OpenAI-compatible chat endpoint whose responses a test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.servers.serve_app import serve_app

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
    with serve_app(Route("/v1/chat/completions", endpoint.__call__, methods=["POST"])) as origin:
        endpoint.url = f"{origin}/v1"
        try:
            yield endpoint
        finally:
            endpoint.release.set()
