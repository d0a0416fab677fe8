"""One server, spoken to over HTTP: who cannot answer is gone, and another may take over; who refuses is quoted."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import httpx2
from anyio import to_thread

from trainer.engine.base import EngineError
from trainer.engine.sglang.memory import remedied

CONNECT_S = 10.0
ASK_S = 30.0
"""For what a server has at hand."""
LIMITS = httpx2.Limits(max_connections=4096, max_keepalive_connections=512, keepalive_expiry=2.0)
"""SGLang closes a connection that was idle for 5 s, whether or not somebody is about to use it."""
BROKEN = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)
QUOTED = 400
"""Characters of a refusal."""


class Gone(EngineError):
    """The server does not answer, or has no room; what was asked may be asked of another."""


class Broken(Gone):
    """The line broke: whether it was heard what was asked, nobody knows."""


class Silent(Gone):
    """It says nothing, not even that it cannot: who asked it for something else will wait as well."""


class Refused(EngineError):
    """It answered, and will not."""

    def __init__(self, told: str, status: int) -> None:
        super().__init__(told)
        self.status = status


class Wire:
    """Entered and left by one task; asked from any."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http: httpx2.AsyncClient | None = None
        self._waiting: set[anyio.CancelScope] = set()
        """For answers."""
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        http, self._http = self._http, None
        if http is not None:
            with anyio.move_on_after(5, shield=True):
                await http.aclose()

    async def get(self, path: str, *, within: float = ASK_S) -> Any:
        return await self._asked("GET", path, None, within, again=True)

    async def post(self, path: str, body: Mapping[str, Any] | bytes, *, within: float = ASK_S) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._asked("POST", path, content, within, again=False)

    def drop(self, why: str) -> None:
        """Whoever waits for an answer will have none: to them the server is gone."""
        self._why = why
        for scope in self._waiting:
            scope.cancel()

    async def _asked(self, method: str, path: str, content: bytes | None, within: float, *, again: bool) -> Any:
        """`again`: what may be asked twice is, where the line breaks."""
        scope = anyio.CancelScope()
        self._waiting.add(scope)
        try:
            with scope, anyio.fail_after(within):
                answer = await self._answer(method, path, content, again)
            if scope.cancelled_caught:
                raise Gone(self._why)
        except TimeoutError as error:
            raise Silent(f"SGLang at {self.url} did not answer {path} within {within:g} s") from error
        except httpx2.TransportError as error:
            kind = Broken if isinstance(error, BROKEN) else Gone
            raise kind(f"SGLang at {self.url} cannot be reached: {type(error).__name__}: {error}") from error
        finally:
            self._waiting.remove(scope)
        if answer.status_code >= 500:
            told = f"SGLang at {self.url} failed at {path} ({answer.status_code}): {_words(answer)}"
            raise Gone(remedied(told))
        if not answer.is_success:
            told = f"SGLang at {self.url} refused {path} ({answer.status_code}): {_words(answer)}"
            raise Refused(told, answer.status_code)
        return _json(answer)

    async def _answer(self, method: str, path: str, content: bytes | None, again: bool) -> httpx2.Response:
        if self._http is None:
            raise EngineError(f"the line to SGLang at {self.url} is not open")
        try:
            return await self._http.request(method, self.url + path, content=content)
        except BROKEN:
            if not again:
                raise
        return await self._http.request(method, self.url + path, content=content)


def _json(answer: httpx2.Response) -> Any:
    """None where an answer has nothing to say, or says it in words."""
    try:
        return answer.json()
    except ValueError:
        return None


def _words(answer: httpx2.Response) -> str:
    told = _json(answer)
    for name in ("error", "detail", "message"):
        told = told.get(name, told) if isinstance(told, dict) else told
    return str(told or answer.text)[:QUOTED]


async def _tls(url: str) -> ssl.SSLContext:
    """Reading the trust store takes a tenth of a second: for https alone."""
    if url.lower().startswith("https:"):
        return await to_thread.run_sync(ssl.create_default_context)
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
