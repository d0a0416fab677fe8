"""A bare Starlette endpoint that reads and writes the same JSON as a tool call through the gateway's HTTP API.

It parses the call and its arguments, calls the tool, and does nothing else: no session, no schema, no limits.
"""

from __future__ import annotations

import json
import socket

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def echo(token: str) -> str:
    """Returns the token."""
    return token


async def call_tools(request: Request) -> JSONResponse:
    """Calls the tools of one message."""
    calls = (await request.json())["tool_calls"]
    texts = [await echo(**json.loads(call["function"]["arguments"])) for call in calls]
    return JSONResponse(
        {
            "messages": [
                {"role": "tool", "tool_call_id": call["id"], "content": text}
                for call, text in zip(calls, texts, strict=True)
            ],
            "results": [_result(call) for call in calls],
        }
    )


def _result(call: dict[str, dict[str, str]]) -> dict[str, object]:
    empty: dict[str, object] = {}
    return {
        "tool_call_id": call["id"],
        "name": call["function"]["name"],
        "outcome": "ok",
        "reward": None,
        "done": False,
        "elapsed_s": 0.000012345,
        "attempts": 1,
        "structured": None,
        "metrics": empty,
        "reason": None,
        "timing": empty,
        "meta": empty,
    }


def main() -> None:
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    app = Starlette(routes=[Route("/v1/sessions/{id}/calls", call_tools, methods=["POST"])])
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", log_level="error", access_log=False, server_header=False
    )
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
