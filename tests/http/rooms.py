"""A served gateway with the kit's tools and some that can be watched; every answer is held against /openapi.json."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import anyio
import httpx2
import jsonschema_rs

from gateway.config.models import Limits
from gateway.http.openapi import document
from gateway.limit import Limited
from gateway.native.function import FunctionTool
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.types import ToolResult
from tests.doors.kit import sources

Answer = httpx2.Response


class Watched:
    """A tool that never answers, and says what became of it; its events are seen from the test's thread."""

    def __init__(self) -> None:
        self.started, self.cancelled = threading.Event(), threading.Event()

    async def hang(self) -> None:
        """Never answers."""
        self.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled.set()


def pick(colour: str, shade: str | None = None, size: int = 1) -> str:
    """Optional arguments of two kinds."""
    return f"{colour} {shade} {size}"


def free(**anything: Any) -> str:
    """Takes what strict schemas cannot say."""
    return json.dumps(anything)


class Thing:
    def __str__(self) -> str:
        return "<thing>"


async def odd() -> ToolResult:
    """What JSON has no words for."""
    return ToolResult(structured={"nan": float("nan"), "thing": Thing()}, reward=float("inf"))


def rooms(*more: FunctionTool) -> Sequence[Source]:
    tools = [FunctionTool(pick, owner="rooms"), FunctionTool(free, owner="rooms"), FunctionTool(odd), *more]
    return [*sources(), Source("rooms", Limited(NativeToolset(tools), Limits()))]


class Caller:
    """Asks one server; an answer that /openapi.json does not know fails the test."""

    def __init__(self, url: str, **headers: str) -> None:
        self.url, self.headers = url, headers

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with httpx2.AsyncClient(verify=_tls(), trust_env=False, timeout=20) as http:
            asked = {**self.headers, **headers}
            answer = await http.request(method, self.url + path, content=content, headers=asked)
        check(method, path.partition("?")[0], answer)
        return answer

    async def begin(self, **wanted: Any) -> str:
        answer = await self("POST", "/v1/sessions", wanted)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def call(self, id: str, name: str, arguments: Any = "{}", **more: Any) -> dict[str, Any]:
        body = {"tool_calls": [tool_call(name, arguments)], **more}
        answer = await self("POST", f"/v1/sessions/{id}/calls", body)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value


def tool_call(name: str, arguments: Any = "{}", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def check(method: str, path: str, answer: Answer) -> None:
    """The status and the body are among those that the document promises."""
    operation = document()["paths"].get(_template(path), {}).get(method.lower().replace("head", "get"))
    if operation is None:
        assert answer.status_code in (401, 403, 404, 405, 413), answer.text
        return
    assert str(answer.status_code) in operation["responses"], f"{answer.status_code} is not documented"
    kinds = operation["responses"][str(answer.status_code)]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in kinds
    if kind == "application/json" and method != "HEAD":
        schema = kinds[kind]["schema"] | {"components": _components()}
        jsonschema_rs.validate(schema, answer.json())


def _template(path: str) -> str:
    parts = path.split("/")
    if parts[1:-1] in (["v1", "live", "sessions"], ["v1", "tapes"], ["ui"]):
        return "/".join([*parts[:-1], "{id}"])
    return "/".join([*parts[:3], "{id}", *parts[4:]]) if parts[1:3] == ["v1", "sessions"] and len(parts) > 3 else path


@cache
def _components() -> Any:
    return document()["components"]


@cache
def _tls() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
