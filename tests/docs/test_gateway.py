"""Every block of docs/gateway.md does what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import JSONResponse

from tests.docs.conftest import Follow
from tests.servers.chat_endpoint import serve_chat


def call_once(count: int, request: dict[str, Any]) -> JSONResponse:
    """Calls `add` once, and then repeats what the tool said."""
    last = request["messages"][-1]
    message: dict[str, Any] = {"role": "assistant", "content": f"It is {last['content']}."}
    if last["role"] == "user":
        (tool,) = request["tools"]
        function = {"name": tool["function"]["name"], "arguments": '{"a": 3, "b": 4}'}
        message = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    about = {"id": "1", "object": "chat.completion", "created": 0, "model": "any"}
    return JSONResponse({**about, "choices": [choice]})


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serve_chat() as server:
        server.respond = call_once
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield


def test_gateway_page(follow: Follow, model: None) -> None:
    done = follow("docs/gateway.md")
    assert '"outcome":"ok"' in done["8771/v1/calls"].replace(" ", "")
    session = done["SESSIONS="].replace(" ", "")
    assert '"content":"42"' in session and '"score":1.0' in session and '"rewards":[' in session
    assert done["my_gateway/loop.py"].strip() == "It is 7.0."
    assert "mtrl_sessions_open" in done["/metrics"]
