"""A stand-in for an OpenEnv server: its HTTP schema and its WebSocket, with the faults that servers have."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from hashlib import sha1
from random import Random
from typing import Any

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
FRAMES = {
    "bytes": b"\x82\x04\x00\x01\x02\x03",
    "huge": b"\x81\x7f" + (2**40).to_bytes(8, "big"),
    "masked": b"\x81\x82abcd",
}
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
        self.pongs = 0
        self.resets = 0
        self.headers: list[str] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            if "GET /schema" in head:
                body = json.dumps({"action": self.action}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            elif self.trouble == "no websocket":
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            else:
                key = head.lower().partition("sec-websocket-key: ")[2]
                key = head[len(head) - len(key) :].partition("\r\n")[0]
                digest = b64encode(sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
                writer.write(
                    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
                    b"sec-websocket-accept: " + digest + b"\r\n\r\n"
                )
                await self._play(reader, writer)
            await writer.drain()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def _play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.open >= self.capacity:
            data = {"message": "at capacity", "code": "CAPACITY_REACHED"}
            await send(writer, {"type": "error", "data": data})
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self._episode(reader, writer)
        finally:
            self.open -= 1

    async def _episode(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        secret = 0
        while (message := await self._receive(reader)) is not None:
            if message["type"] == "reset":
                self.resets += 1
                if self.trouble == "first reset lost" and self.resets == 1:
                    return
                secret = Random(message["data"]["seed"]).randint(1, 9)
                await send(writer, observation(f"Guess. {message['data'].get('level', '')}".strip()))
                if self.trouble == "ping":
                    writer.write(b"\x89\x02hi")
            elif message["type"] == "step":
                if not await self._step(message["data"], secret, reader, writer):
                    return
            else:
                return

    async def _step(
        self, data: dict[str, Any], secret: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """False if the connection is to end."""
        if self.trouble == "silence":
            await reader.read()  # Until the client closes the connection.
            return False
        if self.trouble == "close":
            writer.write(b"\x88\x05\x03\xe8bye")
            return False
        if self.trouble in FRAMES:
            writer.write(FRAMES[self.trouble])
        elif self.trouble == "raise":
            await send(writer, {"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}})
        elif data.get("type") == "list_tools":
            await send(writer, {"type": "observation", "data": {"observation": {"tools": TOOLS}, "done": False}})
        elif data.get("type") == "call_tool":
            await send(writer, call_tool(data["arguments"]["number"], secret))
        else:
            await send(writer, guess(data.get("number"), secret))
        return True

    async def _receive(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """The next message of the client, or None if it closes."""
        while True:
            head = await reader.readexactly(2)
            length = head[1] & 0x7F
            assert head[1] & 0x80, "clients mask their frames"
            if length == 126:
                length = int.from_bytes(await reader.readexactly(2), "big")
            mask, payload = await reader.readexactly(4), await reader.readexactly(length)
            data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
            if head[0] & 0x0F == 8:
                return None
            if head[0] & 0x0F == 10:
                self.pongs += data == b"hi"
                continue
            message: dict[str, Any] = json.loads(data)
            return message


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


async def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Sends a message in two fragments."""
    data = json.dumps(message).encode()
    for first, part, final in ((True, data[:10], False), (False, data[10:], True)):
        head = bytes([(0x80 if final else 0) | (1 if first else 0)])
        size = bytes([len(part)]) if len(part) < 126 else b"\x7e" + len(part).to_bytes(2, "big")
        writer.write(head + size + part)
    await writer.drain()


@asynccontextmanager
async def open_server(trouble: str = "", **options: Any) -> AsyncIterator[OpenEnvServer]:
    """A server on the loopback interface."""
    stand_in = OpenEnvServer(trouble, **options)
    server = await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)
    stand_in.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stand_in
    finally:
        server.close()
        for task in [*stand_in.tasks]:
            task.cancel()
        await asyncio.gather(*stand_in.tasks, return_exceptions=True)
