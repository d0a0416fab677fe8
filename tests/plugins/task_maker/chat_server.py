"""A chat endpoint on this machine, whose replies a test sets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class ChatHandler(BaseHTTPRequestHandler):
    """Answers each request with `reply`; with status 400 where it is empty."""

    def reply(self, body: dict[str, Any]) -> str:
        return ""

    def do_POST(self) -> None:
        text = self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200 if text else 400)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@contextmanager
def serve_chat() -> Iterator[str]:
    """Yields the URL of the endpoint."""
    with HTTPServer(("127.0.0.1", 0), ChatHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join(10)
