"""HTTP client of one SGLang server. An unreachable server may be replaced by another; a refusal is quoted."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Self

import anyio
import httpx2
from anyio import to_thread

from gateway.errors import unwrap_error
from trainer.engine.base import EngineError
from trainer.engine.sglang.server_process import with_memory_remedy


async def run_until_first(waits: Iterable[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    """Runs all until one of them ends, then cancels the others."""
    async with anyio.create_task_group() as tasks:

        async def run(wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(run, wait)


async def run_all(actions: Iterable[Callable[[], Coroutine[Any, Any, Any]]]) -> None:
    """Runs all at the same time; the first error is raised as it is, not as a group."""
    try:
        async with anyio.create_task_group() as tasks:
            for action in actions:
                tasks.start_soon(action)
    except ExceptionGroup as group:
        raise unwrap_error(group) from group


CONNECT_S = 10.0
REQUEST_TIMEOUT_S = 30.0
"""Timeout of requests that need no computation."""
LIMITS = httpx2.Limits(max_connections=4096, max_keepalive_connections=512, keepalive_expiry=2.0)
"""SGLang closes a connection after 5 s without traffic, even if a request is about to be sent on it."""
CONNECTION_LOST = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)
ERROR_CHARS = 400
"""Length of the quoted part of an error response."""


class ServerUnavailable(EngineError):
    """The server does not answer or is out of capacity; another server may be asked."""


class ConnectionBroken(ServerUnavailable):
    """The connection broke, and nobody knows whether the request arrived."""


class ServerTimeout(ServerUnavailable):
    """The server did not answer in time; other requests to it will wait as well."""


class RequestRefused(EngineError):
    """The server answered and refused."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SGLangClient:
    """Opened and closed by one task; any task may send requests."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http: httpx2.AsyncClient | None = None
        self._waiting: set[anyio.CancelScope] = set()
        """Cancel scopes of the requests under way."""
        self._why = ""

    async def __aenter__(self) -> Self:
        self._http = httpx2.AsyncClient(
            headers={"content-type": "application/json"},
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=LIMITS,
            verify=await _tls(self.url),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        http, self._http = self._http, None
        if http is not None:
            with anyio.move_on_after(5, shield=True):
                await http.aclose()

    async def get(self, path: str, *, within: float = REQUEST_TIMEOUT_S) -> Any:
        """The JSON of a GET request, which is sent again if the connection breaks."""
        return json_or_none(await self._request(path, within, lambda: self._send("GET", path, None, again=True)))

    async def post(self, path: str, body: Mapping[str, Any] | bytes, *, within: float = REQUEST_TIMEOUT_S) -> Any:
        """The JSON of a POST request, which is sent once."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return json_or_none(await self._request(path, within, lambda: self._send("POST", path, content, again=False)))

    async def post_stream(
        self, path: str, body: Mapping[str, Any], on_event: Callable[[Any], None], *, within: float
    ) -> None:
        """Sends a POST request once, and gives the JSON of each server-sent event to `on_event` as it comes."""
        content = json.dumps(body).encode()
        await self._request(path, within, lambda: self._stream(path, content, on_event))

    def cancel_waiting(self, why: str) -> None:
        """Ends all requests under way with `ServerUnavailable`."""
        self._why = why
        for scope in self._waiting:
            scope.cancel()

    async def _request(
        self, path: str, within: float, send: Callable[[], Coroutine[Any, Any, httpx2.Response]]
    ) -> httpx2.Response:
        scope = anyio.CancelScope()
        self._waiting.add(scope)
        try:
            with scope, anyio.fail_after(within):
                answer = await send()
            if scope.cancelled_caught:
                raise ServerUnavailable(self._why)
        except TimeoutError as error:
            raise ServerTimeout(f"SGLang at {self.url} did not answer {path} within {within:g} s") from error
        except httpx2.TransportError as error:
            kind = ConnectionBroken if isinstance(error, CONNECTION_LOST) else ServerUnavailable
            raise kind(f"SGLang at {self.url} cannot be reached: {type(error).__name__}: {error}") from error
        finally:
            self._waiting.remove(scope)
        if answer.status_code >= 500:
            message = f"SGLang at {self.url} failed at {path} ({answer.status_code}): {_error_text(answer)}"
            raise ServerUnavailable(with_memory_remedy(message))
        if not answer.is_success:
            message = f"SGLang at {self.url} refused {path} ({answer.status_code}): {_error_text(answer)}"
            raise RequestRefused(message, answer.status_code)
        return answer

    @property
    def _open_http(self) -> httpx2.AsyncClient:
        if self._http is None:
            raise EngineError(f"the client of SGLang at {self.url} is not open")
        return self._http

    async def _send(self, method: str, path: str, content: bytes | None, *, again: bool) -> httpx2.Response:
        """`again` allows a second attempt when the connection breaks."""
        try:
            return await self._open_http.request(method, self.url + path, content=content)
        except CONNECTION_LOST:
            if not again:
                raise
        return await self._open_http.request(method, self.url + path, content=content)

    async def _stream(self, path: str, content: bytes, on_event: Callable[[Any], None]) -> httpx2.Response:
        async with self._open_http.stream("POST", self.url + path, content=content) as answer:
            if not answer.is_success:
                await answer.aread()
                return answer
            async for line in answer.aiter_lines():
                text = line.removeprefix("data:").strip()
                if not line.startswith("data:") or text == "[DONE]":
                    continue
                event = _parse_event(text)
                if "error" in event:
                    raise RequestRefused(f"SGLang at {self.url} failed at {path}: {text[:ERROR_CHARS]}", 400)
                on_event(event)
        return answer


def _parse_event(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise EngineError(f"SGLang sent an event that is no JSON object: {text[:ERROR_CHARS]}")
    return event


def json_or_none(answer: httpx2.Response) -> Any:
    """The JSON of an answer, or None where it is empty or plain text."""
    try:
        return answer.json()
    except ValueError:
        return None


def _error_text(answer: httpx2.Response) -> str:
    detail = json_or_none(answer)
    for name in ("error", "detail", "message"):
        detail = detail.get(name, detail) if isinstance(detail, dict) else detail
    return str(detail or answer.text)[:ERROR_CHARS]


async def _tls(url: str) -> ssl.SSLContext:
    """The TLS context. Reading the trust store takes a tenth of a second, so it happens for https only."""
    if url.lower().startswith("https:"):
        return await to_thread.run_sync(ssl.create_default_context)
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
