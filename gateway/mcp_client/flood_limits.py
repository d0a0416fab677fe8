"""Limits on what a server may send besides its messages: heads, framing, comments, and the loop's time for them.

A server that sends only comments, interim responses or chunk headers never completes a message, so that a limit on the
size of answers alone would not end it.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import anyio
import httpcore2
import httpx2

from gateway.mcp_client.errors import record_cut

HEAD_BYTES = 64 * 1024
"""Maximum size of all heads of one response: the interim ones (`100 Continue`, `103 Early Hints`) and its own."""
FRAMING_BYTES = 256 * 1024
"""How far the bytes on the wire of one response, its heads included, may exceed twice its content."""
COMMENT_BYTES = 1024 * 1024
"""Maximum size of comments and empty events of a stream in a burst; each line costs `LINE_COST` bytes more."""
COMMENT_BYTES_PER_S = 64 * 1024
"""How fast a stream regains what it spent on comments."""
LINE_COST = 32
ENDLESS_LINE_BYTES = 64 * 1024 * 1024
"""How much of a line beyond the maximum is skipped before the stream counts as a flood."""

MAX_OPEN_ANSWERS = 64
"""Answers to a server's requests that may be on their way over HTTP at once; further ones are dropped."""
CHUNK_S, LINE_S, EVENT_S = 25e-6, 2e-6, 100e-6
"""About how long the loop works for a chunk, a line and an event."""
READ_S = 50e-6
"""The same for a read of output that nobody parses."""
_PACE_S, _REST = 0.0005, 4
"""How long the work for one server lasts at a time, and by how much longer others have the loop for themselves."""
_PIECE_BYTES = 4096
_HEAD_READ_BYTES = 4096
_SMALL_CHUNK_BYTES = 1024
_WRITE_BYTES = 65_536
"""More than this is written before the answer is read."""


class StreamFlood(httpx2.RemoteProtocolError):
    """The server sends without end what is no message; the response is given up."""


class WireFlood(httpcore2.RemoteProtocolError):
    """The server sends without end what is no content; the connection is given up."""


class Pacer:
    """Pauses a reader after each short time of work, so that one server takes at most a fifth of the loop's time."""

    def __init__(self) -> None:
        self._worked_s = 0.0

    async def work(self, seconds: float) -> None:
        """Counts work of about `seconds`; pauses if it adds up."""
        self._worked_s += seconds
        if self._worked_s >= _PACE_S:
            pause_s, self._worked_s = _REST * self._worked_s, 0.0
            await anyio.sleep(pause_s)


def split_pieces(chunk: bytes) -> Iterator[bytes]:
    """Cuts a chunk into pieces that are parsed in a few milliseconds, whatever they hold."""
    return (chunk[start : start + _PIECE_BYTES] for start in range(0, len(chunk), _PIECE_BYTES))


class CommentBudget:
    """What a stream of events may still spend on lines that belong to no message."""

    def __init__(self) -> None:
        self._spent, self._counted_at = 0.0, time.monotonic()

    def spend(self, cost: int) -> None:
        """Raises `StreamFlood` when the budget is used up."""
        self._spent += cost
        if self._spent > COMMENT_BYTES:
            now = time.monotonic()
            self._spent = max(0.0, self._spent - (now - self._counted_at) * COMMENT_BYTES_PER_S)
            self._counted_at = now
            if self._spent > COMMENT_BYTES:
                record_cut("comments")
                raise StreamFlood(
                    f"the server sent more than {COMMENT_BYTES} bytes of comments, empty events and other lines "
                    "that are no messages"
                )


class WireMeter:
    """Counts the bytes of one response on the wire beside those of its content."""

    def __init__(self) -> None:
        self.begin_head()

    def begin_head(self) -> None:
        self._in_head, self._wire, self._content = True, 0, 0
        self.pacer = Pacer()

    def end_head(self) -> None:
        self._in_head = False

    async def count_content(self, size: int) -> None:
        """Counts a chunk of content."""
        self._content += size
        if size < _SMALL_CHUNK_BYTES:
            await self.pacer.work(CHUNK_S)

    def limit_read(self, max_bytes: int) -> int:
        """How much to read at once: little before the answer, where it may hold thousands of interim responses."""
        return min(max_bytes, _HEAD_READ_BYTES) if self._in_head else max_bytes

    def count_wire(self, size: int) -> None:
        """Counts bytes that were read; raises if they are too many."""
        self._wire += size
        if self._in_head and self._wire > HEAD_BYTES:
            record_cut("headers")
            raise WireFlood(f"the server sent more than {HEAD_BYTES} bytes of headers")
        if not self._in_head and self._wire > 2 * self._content + FRAMING_BYTES:
            record_cut("framing")
            raise WireFlood("the server sent more framing than content")


ADDRESSES = "addresses"
"""Extension of a request: the addresses to connect to, which were looked up and checked."""


class MeteredBackend(httpcore2.AsyncNetworkBackend):
    """Connects one connection, to one of `addresses` if they are given; its reads are counted by `meter`."""

    def __init__(self, meter: WireMeter, addresses: Sequence[str] | None) -> None:
        self._meter, self._addresses = meter, addresses

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        backend = httpcore2.AnyIOBackend()  # anyio's own streams work on asyncio and on trio
        options = (port, timeout, local_address, socket_options)
        *others, last = self._addresses or [host]
        for address in others:
            with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return MeteredStream(await backend.connect_tcp(address, *options), self._meter)
        return MeteredStream(await backend.connect_tcp(last, *options), self._meter)


class MeteredStream(httpcore2.AsyncNetworkStream):
    """Counts what is read. A request's head and body are written together: each write costs a system call."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, meter: WireMeter) -> None:
        self._stream, self._meter = stream, meter
        self._unwritten = bytearray()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with suppress(httpcore2.WriteError):  # the server may have answered and closed before it read everything
            await self._flush(timeout)
        data = await self._stream.read(self._meter.limit_read(max_bytes), timeout)
        self._meter.count_wire(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._unwritten += buffer
        if len(self._unwritten) > _WRITE_BYTES:
            await self._flush(timeout)

    async def _flush(self, timeout: float | None) -> None:
        if self._unwritten:
            data, self._unwritten = bytes(self._unwritten), bytearray()
            await self._stream.write(data, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        return MeteredStream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._meter)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
