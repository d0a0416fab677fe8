"""A connection is looked at when it is taken or left, never because of the others.

The pool of the HTTP client asks every open connection at every request whether it still lives: with hundreds of
rollouts at one server, that costs more than all the rest of a call.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import anyio
import httpcore2
import httpx2

_KEPT_S = 30.0
_MOST_KEPT = 512
_CLOSE_S = 1.0


class SpareTransport(httpx2.AsyncHTTPTransport):
    """The client's own transport over connections of ours; how many there are is for the callers' limits to say."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(verify=context, trust_env=False)
        self._pool = cast(Any, _Spare(context))


class _Spare:
    """Idle connections by origin, the last used on top, so that those which are too many grow old below."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._idle: dict[bytes, deque[httpcore2.AsyncHTTPConnection]] = {}

    async def handle_async_request(self, request: httpcore2.Request) -> httpcore2.Response:
        origin = request.url.origin
        connection = await self._take(origin)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await _close(connection)
            raise

        async def leave() -> None:
            await self._leave(_key(origin), connection)

        body = _Body(cast(AsyncIterable[bytes], response.stream), leave)
        return httpcore2.Response(
            response.status, headers=response.headers, content=body, extensions=response.extensions
        )

    async def _take(self, origin: httpcore2.Origin) -> httpcore2.AsyncHTTPConnection:
        idle = self._idle.get(_key(origin))
        while idle:
            connection = idle.pop()
            if not connection.has_expired():
                return connection
            await _close(connection)
        return httpcore2.AsyncHTTPConnection(origin, self._context, keepalive_expiry=_KEPT_S)

    async def _leave(self, key: bytes, connection: httpcore2.AsyncHTTPConnection) -> None:
        """Whoever leaves one sees to the oldest, so that old ones do not stay."""
        if not connection.is_available():
            await _close(connection)
            return
        idle = self._idle.setdefault(key, deque())
        idle.append(connection)
        if len(idle) > _MOST_KEPT or idle[0].has_expired():
            await _close(idle.popleft())

    async def aclose(self) -> None:
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                await _close(connection)


class _Body:
    """The body of a response, which leaves its connection when it is closed."""

    def __init__(self, stream: AsyncIterable[bytes], leave: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._leave = stream, leave
        self._closed = False

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        async with aclosing(cast(AsyncGenerator[bytes], self._stream.__aiter__())) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await cast(Any, self._stream).aclose()
        await self._leave()


def _key(origin: httpcore2.Origin) -> bytes:
    return b"%b://%b:%d" % (origin.scheme, origin.host, origin.port)


async def _close(connection: httpcore2.AsyncHTTPConnection) -> None:
    with anyio.move_on_after(_CLOSE_S, shield=True):
        await connection.aclose()
