"""The model endpoint of a host process: an OpenAI-compatible chat API on the loopback interface.

Environments call it as they would call any server; each turn is the policy's. The `model` of a request is the rollout.
Runs in the host process, so only the standard library is available.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

MAX_BODY_BYTES = 64 * 2**20
KEY_VARIABLE = "MTRL_POLICY_TOKEN"
"""The environment variable with the endpoint's key, which frameworks take keys from."""
OVER = "the policy can write no more turns: this rollout reached its maximum context length"
"""Clients of all frameworks recognise a prompt that is too long by these words."""
STATUS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


class ModelEndpoint:
    """Serves `POST /v1/chat/completions`; each request waits until the trainer has the policy's turn."""

    def __init__(self) -> None:
        self.conversations: OrderedDict[str, Any] = OrderedDict()
        """The rollouts by name."""
        self.key = secrets.token_urlsafe(24)
        os.environ[KEY_VARIABLE] = self.key
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The base URL, which ends in `/v1`."""
        if self._server is None:
            raise RuntimeError("the endpoint is not open")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"http://{host}:{port}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**16)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves the requests of one connection."""
        ends = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError)
        with suppress(*ends, ConnectionError, ValueError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                length = int(headers.get("content-length", "0"))
                if not 0 <= length <= MAX_BODY_BYTES:
                    break
                status, answer = await self._answer(head[0], headers, await reader.readexactly(length))
                body = json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} {STATUS[status]}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        writer.close()

    async def _answer(self, request: str, headers: Mapping[str, str], body: bytes) -> tuple[int, Any]:
        if not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self.key}".encode()):
            return 401, _refusal("the key is wrong")
        method, _, path = request.partition(" ")
        if (method, path.split(" ")[0]) != ("POST", "/v1/chat/completions"):
            return 404, _refusal("this endpoint only serves /v1/chat/completions")
        asked = json.loads(body)
        conversation = self.conversations.get(asked.get("model"))
        if conversation is None:
            return 404, _refusal("the `model` is no rollout of this process")
        if asked.get("stream"):
            return 400, _refusal("this endpoint does not stream")
        reply = await conversation.ask({"messages": asked.get("messages"), "tools": asked.get("tools") or []})
        return (400, _refusal(OVER)) if reply is None else (200, _completion(asked["model"], reply))


def _refusal(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error", "code": None}}


def _completion(model: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion with the policy's turn."""
    choice = {"index": 0, "message": reply["message"], "finish_reason": reply["finish_reason"], "logprobs": None}
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": reply["usage"],
    }
