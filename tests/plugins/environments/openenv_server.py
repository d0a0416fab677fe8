"""A stand-in for an OpenEnv server: its HTTP schema and its WebSocket, with the faults that servers have."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from random import Random
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from tests.toolset_conformance.sample_tools import PNG

ACTION = {
    "title": "GuessAction",
    "type": "object",
    "additionalProperties": False,
    "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["number"],
}

TOOLS = [
    {
        "name": "guess",
        "description": "Guesses.",
        "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    }
]
FRAMES = {"bytes": b"\x82\x04\x00\x01\x02\x03", "huge": b"\x81\x7f" + (2**40).to_bytes(8, "big")}
"""What breaks the protocol."""
ERRORS = {0: "invalid_args", -1: "execution_error", -2: "timeout"}
"""What a call of the tool with these numbers fails with."""


class OpenEnvServer:
    """Guess a number from 1 to 9, which the seed decides. `trouble` is what goes wrong."""

    def __init__(self, trouble: str = "", capacity: int = 64, action: dict[str, Any] | None = None) -> None:
        self.trouble, self.capacity, self.action = trouble, capacity, action or ACTION
        self.open = 0
        self.most = 0
        """The most sessions that were open at once."""
        self.resets = 0
        self.headers: list[str] = []
        self.url = ""

    def answer_http(self, connection: ServerConnection, request: Request) -> Response | None:
        """What is answered instead of opening a WebSocket."""
        self.headers.append(str(request.headers))
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps({"action": self.action}))
        return connection.respond(HTTPStatus.NOT_FOUND, "") if self.trouble == "no websocket" else None

    async def play(self, connection: ServerConnection) -> None:
        """One connection."""
        if self.open >= self.capacity:
            data = {"message": "at capacity", "code": "CAPACITY_REACHED"}
            await send(connection, {"type": "error", "data": data})
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            with suppress(ConnectionClosed):
                await self._episode(connection)
        finally:
            self.open -= 1

    async def _episode(self, connection: ServerConnection) -> None:
        secret = 0
        async for text in connection:
            message = json.loads(text)
            if message["type"] == "reset":
                self.resets += 1
                if self.trouble == "first reset lost" and self.resets == 1:
                    return
                secret = Random(message["data"]["seed"]).randint(1, 9)
                await send(connection, observation(f"Guess. {message['data'].get('level', '')}".strip()))
            elif message["type"] == "step":
                await self._step(connection, message["data"], secret)
            else:
                return

    async def _step(self, connection: ServerConnection, data: dict[str, Any], secret: int) -> None:
        if self.trouble == "silence":
            await connection.wait_closed()
        elif self.trouble == "close":
            await connection.close(1000, "bye")
        elif self.trouble in FRAMES:
            connection.transport.write(FRAMES[self.trouble])
        elif self.trouble == "raise":
            await send(connection, {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}})
        elif data.get("type") == "list_tools":
            await send(connection, {"type": "observation", "data": {"observation": {"tools": TOOLS}, "done": False}})
        elif data.get("type") == "call_tool":
            await send(connection, call_tool(data["arguments"]["number"], secret))
        else:
            await send(connection, guess(data.get("number"), secret))


def guess(number: Any, secret: int) -> dict[str, Any]:
    """The answer to a guess."""
    if not isinstance(number, int) or number > 9:
        errors = [{"loc": ["number"], "msg": "should be at most 9"}]
        data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
        return {"type": "error", "data": data}
    right = number == secret
    text = "right" if right else "higher" if number < secret else "lower"
    return observation(text, reward=1.0 if right else -0.1, done=right)


def call_tool(number: int, secret: int) -> dict[str, Any]:
    """The answer to a guess by a call of the environment's own tool."""
    if number in ERRORS:
        error = {"error_type": ERRORS[number], "message": "it cannot be"}
        fields = {"tool_name": "guess", "result": None, "error": error}
        return {"type": "observation", "data": {"observation": fields, "done": False}}
    answer = guess(number, secret)
    text = {"type": "text", "text": answer["data"]["observation"]["hint"]}
    content = [text, {"type": "image", "data": b64encode(PNG).decode(), "mimeType": "image/png"}]
    answer["data"]["observation"] = {"tool_name": "guess", "result": {"content": content}, "error": None}
    return answer


def observation(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    """The answer to a reset or a step."""
    fields = {"hint": text, "metadata": {}}
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


async def send(connection: ServerConnection, message: dict[str, Any]) -> None:
    """Sends a message in two fragments."""
    text = json.dumps(message)
    await connection.send([text[:10], text[10:]])


@asynccontextmanager
async def open_server(trouble: str = "", **options: Any) -> AsyncIterator[OpenEnvServer]:
    """A server on the loopback interface."""
    stand_in = OpenEnvServer(trouble, **options)
    async with serve(stand_in.play, "127.0.0.1", 0, process_request=stand_in.answer_http, compression=None) as server:
        stand_in.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        yield stand_in
