"""HTTP clients are built once and shared by all servers; headers belong to requests, and cookies to nobody."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import anyio
import httpx2
from anyio import to_thread

from gateway.upstream.fault import Flight
from gateway.upstream.spare import SpareTransport

_CONNECT_S = 10.0
_MOST_REDIRECTS = 3
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol)
_REST_S = 1.0
"""For the end of a body whose answer has been read: a body read to its end leaves its connection fit for use."""


class Web:
    """One client for plain HTTP, one for TLS; each is made when a server first needs it."""

    def __init__(self) -> None:
        self._plain: httpx2.AsyncClient | None = None
        self._secure: httpx2.AsyncClient | None = None
        self._turn = anyio.Lock()

    async def client(self, url: str) -> httpx2.AsyncClient:
        """Loading the trust store costs a tenth of a second of CPU, so it happens once, and only for https."""
        async with self._turn:
            if not url.lower().startswith("https:"):
                self._plain = self._plain or _client(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
                return self._plain
            if self._secure is None:
                self._secure = _client(await to_thread.run_sync(ssl.create_default_context))
            return self._secure

    async def aclose(self) -> None:
        clients, self._plain, self._secure = (self._plain, self._secure), None, None
        with anyio.move_on_after(5, shield=True):
            for client in clients:
                if client is not None:
                    await client.aclose()


def _client(context: ssl.SSLContext) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=SpareTransport(context),
        timeout=httpx2.Timeout(30.0, connect=_CONNECT_S, read=None),
        headers={"accept-encoding": "identity"},
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        trust_env=False,
    )


@asynccontextmanager
async def exchange(
    client: httpx2.AsyncClient, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
) -> AsyncIterator[httpx2.Response]:
    """A response whose body is still to come; a redirect is followed only within its origin, where nothing leaks."""
    request = client.build_request(method, url, headers=headers, content=body)
    for _ in range(_MOST_REDIRECTS):
        response = await client.send(request, stream=True)
        following = response.next_request
        if response.status_code not in (307, 308) or following is None or not _same_origin(request, following):
            break
        await response.aclose()
        request = following
    try:
        yield response
    finally:
        await response.aclose()


def _same_origin(one: httpx2.Request, other: httpx2.Request) -> bool:
    here, there = one.url, other.url
    return (here.scheme, here.host, here.port) == (there.scheme, there.host, there.port)


async def consume(response: httpx2.Response, take: Callable[[bytes], Awaitable[bool]]) -> None:
    """Gives chunks to `take` until it has had enough; then only a moment is left for the rest."""
    with anyio.CancelScope() as scope:
        async for chunk in response.aiter_raw():
            if scope.deadline < anyio.current_time() + _REST_S or await take(chunk):
                scope.deadline = min(scope.deadline, anyio.current_time() + _REST_S)


async def body(response: httpx2.Response, most_bytes: int) -> bytes | None:
    """The whole body, or None where it is larger than that."""
    chunks: list[bytes] = []
    size = 0

    async def take(chunk: bytes) -> bool:
        nonlocal size
        size += len(chunk)
        if size <= most_bytes:
            chunks.append(chunk)
        return size > most_bytes

    await consume(response, take)
    return b"".join(chunks) if size <= most_bytes else None


def note(flight: Flight, error: Exception, url: httpx2.URL) -> str:
    """Puts on the flight what a failed exchange means for it, and says it."""
    place = f"{url.host}:{url.port or url.scheme}"
    # The words of a request that could not be written quote it, secrets included.
    words = "" if isinstance(error, httpx2.LocalProtocolError) else str(error)
    words = words or type(error).__name__
    if isinstance(error, _NEVER_SENT):
        flight.unreachable = True
        flight.refused = f"cannot connect to {place}: {words}"
        return flight.refused
    flight.broken = f"the connection to {place} broke: {words}"
    return flight.broken
