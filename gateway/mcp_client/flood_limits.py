"""Limits on what a server may send besides its messages: heads, framing, comments, and the loop's time for them.

A server that sends only comments, interim responses or chunk headers never completes a message, so that a limit on the
size of answers alone would not end it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import anyio
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
CHUNK_S, PIECE_S, LINE_S, EVENT_S = 25e-6, 2e-6, 2e-6, 100e-6
"""About how long the loop works for a chunk, for a piece that comes with others, for a line and for an event."""
READ_S = 50e-6
"""The same for a read of output that nobody parses."""
_PACE_S, _REST = 0.0005, 4
"""How long the work for one server lasts at a time, and by how much longer others have the loop for themselves."""
_PIECE_BYTES = 4096
_SMALL_READ_BYTES, _READ_BYTES = 4096, 65_536
_SMALL_CHUNK_BYTES = 1024


class StreamFlood(httpx2.RemoteProtocolError):
    """The server sends without end what is no message; the response is given up."""


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
        self._in_head, self._is_choppy, self._wire, self._content = True, False, 0, 0
        self.pacer = Pacer()

    def end_head(self) -> None:
        self._in_head = False

    async def count_content(self, size: int, pieces: int) -> None:
        """Counts content, which came in so many pieces."""
        self._content += size
        self._is_choppy = pieces * _SMALL_CHUNK_BYTES > size
        if self._is_choppy:
            await self.pacer.work(CHUNK_S + pieces * PIECE_S)

    def limit_read(self) -> int:
        """How much to read at once: little where it may hold thousands of interim responses or of pieces."""
        return _SMALL_READ_BYTES if self._in_head or self._is_choppy else _READ_BYTES

    def count_wire(self, size: int) -> None:
        """Counts bytes that were read; raises if they are too many."""
        self._wire += size
        if self._in_head and self._wire > HEAD_BYTES:
            record_cut("headers")
            raise httpx2.RemoteProtocolError(f"the server sent more than {HEAD_BYTES} bytes of headers")
        if not self._in_head and self._wire > 2 * self._content + FRAMING_BYTES:
            record_cut("framing")
            raise httpx2.RemoteProtocolError("the server sent more framing than content")
