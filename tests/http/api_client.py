"""`ApiClient`, which checks every response against /openapi.json, and the tools of the gateway in the HTTP tests."""

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
from gateway.http.app import OPERATIONS
from gateway.http.openapi import openapi_document
from gateway.limits import LimitedToolset
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.tool_table import Source
from gateway.types import ToolResult
from tests.toolset_conformance.sample_tools import sample_sources
from tests.waiting import PATIENCE_S

Response = httpx2.Response


class HangingTool:
    """A tool that never answers and records its start and cancellation in events, for the test's thread."""

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
    """A tool with optional arguments of two types."""
    return f"{colour} {shade} {size}"


def free(**anything: Any) -> str:
    """A tool whose parameters strict mode cannot express."""
    return json.dumps(anything)


class Thing:
    def __str__(self) -> str:
        return "<thing>"


async def odd() -> ToolResult:
    """A tool whose result has values without a JSON equivalent."""
    return ToolResult(structured={"nan": float("nan"), "thing": Thing()}, reward=float("inf"))


def http_sources(*more: FunctionTool) -> Sequence[Source]:
    tools = [FunctionTool(pick, owner="rooms"), FunctionTool(free, owner="rooms"), FunctionTool(odd), *more]
    return [*sample_sources(), Source("rooms", LimitedToolset(NativeToolset(tools), Limits()))]


class ApiClient:
    """Sends requests to one server; fails the test if a response does not match /openapi.json."""

    def __init__(self, url: str, **headers: str) -> None:
        self.url, self.headers = url, headers

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with httpx2.AsyncClient(verify=_ssl_context(), trust_env=False, timeout=PATIENCE_S) as http:
            typed = {} if content is None else {"content-type": "application/json"}
            all_headers = {**typed, **self.headers, **headers}
            answer = await http.request(method, self.url + path, content=content, headers=all_headers)
        check_documented(method, path.partition("?")[0], answer)
        return answer

    async def begin(self, **options: Any) -> str:
        answer = await self("POST", "/v1/sessions", options)
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


def check_documented(method: str, path: str, answer: Response) -> None:
    """Asserts that /openapi.json documents the response's status and body."""
    operation = (
        openapi_document(OPERATIONS)["paths"].get(_path_template(path), {}).get(method.lower().replace("head", "get"))
    )
    if operation is None:
        assert answer.status_code in (400, 401, 403, 404, 405, 413, 415), answer.text
        return
    assert str(answer.status_code) in operation["responses"], f"{answer.status_code} is not documented"
    kinds = operation["responses"][str(answer.status_code)]["content"]
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind in kinds
    if kind == "application/json" and method != "HEAD":
        schema = kinds[kind]["schema"] | {"components": _components()}
        jsonschema_rs.validate(schema, answer.json())


def _path_template(path: str) -> str:
    parts = path.split("/")
    if parts[1:-1] == ["ui"]:
        return "/ui/{id}"
    is_nested = parts[1:3] in (["v1", "sessions"], ["v1", "servers"]) and len(parts) > 3
    return "/".join([*parts[:3], "{id}", *parts[4:]]) if is_nested else path


@cache
def _components() -> Any:
    return openapi_document(OPERATIONS)["components"]


@cache
def _ssl_context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
