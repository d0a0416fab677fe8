"""Every block of docs/gateway.md does what it says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.docs.conftest import Follow


class Model(BaseHTTPRequestHandler):
    """A chat endpoint that calls `add` once, and then repeats what the tool said."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        last = request["messages"][-1]
        message: dict[str, Any] = {"role": "assistant", "content": f"It is {last['content']}."}
        if last["role"] == "user":
            (tool,) = request["tools"]
            function = {"name": tool["function"]["name"], "arguments": '{"a": 3, "b": 4}'}
            message = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "any", "choices": [choice]})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the test's output is not the place."""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield
        server.shutdown()


def test_gateway_page(follow: Follow, model: None) -> None:
    done = follow("docs/gateway.md")
    assert '"outcome":"ok"' in done["8771/v1/calls"].replace(" ", "")
    session = done["SESSIONS="].replace(" ", "")
    assert '"content":"42"' in session and '"score":1.0' in session and '"rewards":[' in session
    assert done["my_gateway/loop.py"].strip() == "It is 7.0."
    assert "mtrl_sessions_open" in done["/metrics"]
