"""HTTP clients are shared and built once; a failed request is an answer, never the end of its neighbours."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from functools import partial
from types import TracebackType
from typing import Self, cast

import anyio
import httpx2
from anyio import to_thread

from gateway.types import ALONE
from gateway.upstream.fault import Flight, flight_now

LIMITS = httpx2.Limits(max_connections=4096, max_keepalive_connections=512, keepalive_expiry=30.0)
_CONNECT_S = 10.0
_HEADERS_S = 10.0
"""For the answer to a message that is no request: nobody waits for it, and others stand behind it."""
_SLACK = 65536
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class Web:
    """One pool of connections for all servers of a gateway; each server's client is a light view on it."""

    def __init__(self) -> None:
        self._plain: httpx2.AsyncHTTPTransport | None = None
        self._secure: httpx2.AsyncHTTPTransport | None = None
        self._turn = anyio.Lock()

    async def client(self, url: str, headers: Mapping[str, str], most_bytes: int) -> httpx2.AsyncClient:
        pool = await self._pool(secure=url.lower().startswith("https:"))
        return httpx2.AsyncClient(
            transport=_Sound(pool, most_bytes),
            headers={**headers, "accept-encoding": "identity"},
            timeout=httpx2.Timeout(30.0, connect=_CONNECT_S, read=None),
            trust_env=False,
        )

    async def _pool(self, *, secure: bool) -> httpx2.AsyncHTTPTransport:
        """Loading the trust store costs a tenth of a second of CPU, so it happens once, and only for https."""
        async with self._turn:
            if not secure:
                self._plain = self._plain or _pool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
                return self._plain
            if self._secure is None:
                self._secure = _pool(await to_thread.run_sync(ssl.create_default_context))
            return self._secure

    async def aclose(self) -> None:
        pools, self._plain, self._secure = (self._plain, self._secure), None, None
        with anyio.move_on_after(5, shield=True):
            for pool in pools:
                if pool is not None:
                    await pool.aclose()


_pool = partial(httpx2.AsyncHTTPTransport, limits=LIMITS, trust_env=False)


class _Sound(httpx2.AsyncBaseTransport):
    """Notes on the request's flight what went wrong, and gives a 503 for what would tear a whole client down."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, most_bytes: int) -> None:
        self._inner, self._most_bytes = inner, most_bytes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """The pool outlives every client on it."""

    async def aclose(self) -> None:
        """The pool outlives every client on it."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        flight = flight_now.get()
        asks = request.method == "POST" and flight is not None and not flight.sent
        noted = flight if flight is not None and (asks or request.method == "GET") else Flight(ALONE)
        noted.sent = noted.sent or asks
        try:
            with anyio.fail_after(None if asks or request.method == "GET" else _HEADERS_S):
                response = await self._inner.handle_async_request(request)
        except _NEVER_SENT as error:
            noted.refused = f"cannot connect to {_place(request)}: {_words(error)}"
            return httpx2.Response(503, request=request)
        except (httpx2.TransportError, TimeoutError) as error:
            noted.broken = f"the connection to {_place(request)} broke: {_words(error)}"
            return httpx2.Response(503, request=request)
        self._note(noted, request, response)
        return response

    def _note(self, flight: Flight, request: httpx2.Request, response: httpx2.Response) -> None:
        flight.status = response.status_code
        flight.challenge = response.headers.get("www-authenticate")
        flight.session_lost = response.status_code == 404 and "mcp-session-id" in request.headers
        for name in ("set-cookie", "content-encoding"):
            response.headers.pop(name, None)
        streams = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        body = cast(httpx2.AsyncByteStream, response.stream)
        response.stream = _Body(body, flight, None if streams else self._most_bytes + _SLACK)


class _Body(httpx2.AsyncByteStream):
    """Ends early in the one way that the SDK expects of a broken body."""

    def __init__(self, inner: httpx2.AsyncByteStream, flight: Flight, most: int | None) -> None:
        self._inner, self._flight, self._most = inner, flight, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._inner:
                size += len(chunk)
                if self._most is not None and size > self._most:
                    raise httpx2.StreamError(f"the answer exceeded the {self._most} byte limit")
                yield chunk
        except httpx2.TransportError as error:
            self._flight.broken = f"the answer broke off: {_words(error)}"
            raise httpx2.StreamError(self._flight.broken) from error

    async def aclose(self) -> None:
        await self._inner.aclose()


def _place(request: httpx2.Request) -> str:
    return f"{request.url.host}:{request.url.port or request.url.scheme}"


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
