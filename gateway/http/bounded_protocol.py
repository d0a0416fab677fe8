"""uvicorn's HTTP protocol with limits on heads and bodies, which hold before the application sees a request.

uvicorn waits without end for the end of a head, keeps headers of any size, and lets a body trickle. No token is looked
at by then, so anybody who can connect could use up memory and connections. h11 bounds the size of a head, but no time,
and a call then takes 370 us of processor time in place of 275 (with 64 callers, 450 in place of 225).
"""

from __future__ import annotations

from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.http.exchange import Problem
from gateway.http.settings import Settings
from gateway.wire import dumps

MAX_OPEN_HEADS = 4096
"""Connections that may be without a complete head at a time; beyond that the oldest is closed.

More than the backlog, so that a burst of callers who send their heads at once loses none.
"""
MAX_PIPELINED = 16
"""Requests that one connection may send before the first is answered."""
TAKE_S = 120.0
"""How long a client may leave what is written for it unread, before its connection is cut off."""
BODY_BYTES_PER_S = 64 * 1024
"""The rate at which a body must arrive on average once its grace (`body_s`) is over."""
_PIECE_BYTES = 4096
_WRITES_AT_ONCE = 16
"""Responses that wait for each other at most, so that clients begin to read while others are served."""


class OpenHeads:
    """The connections of one server that have not sent a complete head, the oldest first."""

    def __init__(self, most: int = MAX_OPEN_HEADS) -> None:
        self._most = most
        self._connections: dict[BoundedProtocol, None] = {}

    def add(self, connection: BoundedProtocol) -> None:
        """Adds a connection; closes the oldest if there are too many."""
        self._connections.setdefault(connection)
        if len(self._connections) > self._most:
            oldest = next(iter(self._connections))
            self.discard(oldest)
            oldest.transport.abort()

    def discard(self, connection: BoundedProtocol) -> None:
        self._connections.pop(connection, None)


class WriteTurn:
    """The connections of one server that have something to write at the end of a turn of the event loop.

    Each write may wake a client, on the same machine for up to 100 us of processor time; several in a row wake it once.
    """

    def __init__(self) -> None:
        self._waiting: list[JoinedWrites] = []

    def add(self, writes: JoinedWrites, loop: Any) -> None:
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append(writes)
        if len(self._waiting) == _WRITES_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for writes in waiting:
            writes.flush()


class JoinedWrites:
    """A transport that sends two writes with one system call: uvicorn writes the head of a response alone.

    The first write waits for the second, or for the next turn of the event loop.
    """

    __slots__ = ("_loop", "_transport", "_turn", "_waiting", "abort", "is_closing")

    def __init__(self, transport: Any, loop: Any, turn: WriteTurn) -> None:
        self._transport, self._loop, self._turn, self._waiting = transport, loop, turn, b""
        self.abort, self.is_closing = transport.abort, transport.is_closing

    def write(self, data: bytes) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, b""
            self._transport.write(waiting + data)
        else:
            self._waiting = data
            self._turn.add(self, self._loop)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, b""
        if waiting and not self._transport.is_closing():
            self._transport.write(waiting)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Cycle(RequestResponseCycle):
    """A request whose response may be sent in one piece. uvicorn checks each of our own headers by two patterns."""

    def respond(self, status: int, head: bytes, body: bytes) -> bool:
        """Sends a whole response; False, and nothing is sent, if the client must first read others."""
        if self.disconnected:
            return True
        if self.flow.write_paused or self.response_started or not self.keep_alive or self.scope["method"] == "HEAD":
            return False
        own = [b"%b: %b\r\n" % header for header in self.default_headers]
        length = b"content-length: %d\r\n\r\n" % len(body)
        self.response_started = self.response_complete = True
        self.transport.write(b"".join((STATUS_LINE[status], *own, head, length, body)))
        self.message_event.set()
        self.on_response()
        return True


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `bound_protocol` makes the class for a server's settings."""

    settings: ClassVar[Settings]
    open_heads: ClassVar[OpenHeads]
    write_turn: ClassVar[WriteTurn]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._refused = False
        self._in_head = True
        self._has_body_cycle = False
        """Whether `cycle` is that of the body which is being read."""
        self._messages = 0
        self._piece_bytes, self._head_bytes, self._start_bytes = 0, 0, 0
        """Those of the piece that is read, of a head's pieces so far, and of one in which a head began after others."""
        self._wire_bytes, self._body_bytes, self._body_started_at = 0, 0, 0.0
        self._timer: Any = None
        self._unread_timer: Any = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self._unread_timer or self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport = JoinedWrites(transport, self.loop, self.write_turn)  # type: ignore[assignment]
        self.open_heads.add(self)
        self._start_timer(self.settings.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        self.open_heads.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self._refused and not self.transport.is_closing():
            # A head is parsed in small pieces, so that one that is too long is noticed early.
            size = _PIECE_BYTES if self._in_head else len(data)
            self._receive_piece(data[:size])
            data = data[size:]

    def _receive_piece(self, piece: bytes) -> None:
        was_in_head, messages, self._piece_bytes = self._in_head, self._messages, len(piece)
        super().data_received(piece)
        if self._refused or self.transport.is_closing():
            return
        if self._in_head:
            if was_in_head and messages == self._messages:
                self._head_bytes += len(piece)
            else:
                self._start_bytes = len(piece)
            has_fields = self._has_started and len(self.headers) > self.settings.head_fields
            if self._head_bytes > self.settings.head_bytes or has_fields:
                self._refuse(_head_too_large(self.settings))
                return
        elif not was_in_head:
            self.headers.clear()  # of a body, where they are trailers, which nobody reads
            self._wire_bytes += len(piece)
            if self._wire_bytes > 2 * self._body_bytes + self.settings.head_bytes:
                self._refuse(Problem(400, "invalid_request", "The body has more framing than content."))
                return
        self._watch(has_changed=(was_in_head, messages) != (self._in_head, self._messages))

    def _watch(self, *, has_changed: bool) -> None:
        """Starts the deadline for what is incomplete, or stops the one for what has become complete."""
        if has_changed:
            self._stop_timer()
        if not self._in_head:
            if has_changed:
                self._body_started_at = self.loop.time()
            if self._timer is None:
                self._start_timer(self.settings.body_s)
        elif self._has_started or not has_changed:
            self.open_heads.add(self)
            if self._timer is None:
                self._start_timer(self.settings.head_s)
        elif not self._is_answering and self.timeout_keep_alive_task is None:
            # The response was sent before the body ended, whose bytes stopped the timer of an idle connection.
            self._start_timer(self.settings.head_s)

    def _start_timer(self, delay_s: float) -> None:
        self._timer = self.loop.call_later(delay_s, self._check_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_head:
            if self._is_answering:
                self._start_timer(self.settings.head_s)
            elif self._has_started:
                self._refuse(_too_slow("headers", self.settings.head_s))
            else:
                self.transport.close()
            return
        allowed_s = self.settings.body_s + self._body_bytes / BODY_BYTES_PER_S
        remaining_s = self._body_started_at + allowed_s - self.loop.time()
        if self.flow.read_paused:
            self._start_timer(self.settings.body_s)
        elif remaining_s > 0:
            self._start_timer(remaining_s)
        else:
            self._refuse(_too_slow("body", allowed_s))

    @property
    def _has_started(self) -> bool:
        """Whether a head has begun that is not complete."""
        return self.scope is not None

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_reading_answered_body(self) -> bool:
        return self._has_body_cycle and self.cycle is not None and self.cycle.response_complete

    def _refuse(self, problem: Problem) -> None:
        """Answers with the problem, unless a response is under way, and closes the connection."""
        self._refused = True
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self._is_answering and self.cycle.response_started:
            self.transport.abort()
            return
        if self._is_reading_answered_body:
            self.transport.close()
            return
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = dumps({"error": dict(problem.error)})
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[problem.status] + head + body)
        self.transport.close()

    def on_headers_complete(self) -> None:
        is_small = self._start_bytes + self._head_bytes + self._piece_bytes <= self.settings.head_bytes
        self._in_head = False
        self._start_bytes = self._head_bytes = self._wire_bytes = self._body_bytes = 0
        self.open_heads.discard(self)
        if self._refused:
            return
        if len(self.headers) > self.settings.head_fields or not (is_small or self._is_head_small()):
            self._refuse(_head_too_large(self.settings))
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(Problem(400, "invalid_request", f"More than {MAX_PIPELINED} requests are pipelined."))
        else:
            super().on_headers_complete()
            self.cycle.__class__ = _Cycle  # uvicorn names its own class
            self._has_body_cycle = True
        self.headers, self.scope = [], None  # type: ignore[assignment] # a trailer must not pass for a header

    def _is_head_small(self) -> bool:
        fields = sum(len(name) + len(value) + 4 for name, value in self.headers)
        return len(self.url) + fields <= self.settings.head_bytes

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.settings.body_bytes and self._is_reading_answered_body:
            self._refuse(Problem(413, "too_large", "The rest of a refused body is too large to be skipped."))
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._has_body_cycle = True, False
        self._messages += 1
        if not self._refused:
            super().on_message_complete()


def bound_protocol(settings: Settings) -> type[BoundedProtocol]:
    """The protocol class for one server."""
    shared = {"settings": settings, "open_heads": OpenHeads(), "write_turn": WriteTurn()}
    return type("BoundedProtocol", (BoundedProtocol,), shared)


def _head_too_large(settings: Settings) -> Problem:
    message = f"The headers are larger than {settings.head_bytes} bytes, or more than {settings.head_fields}."
    return Problem(431, "too_large", message, remedy="Send fewer and shorter headers.")


def _too_slow(part: str, seconds: float) -> Problem:
    return Problem(
        408, "invalid_request", f"The {part} did not arrive within {seconds:.0f} s.", remedy="Send it again."
    )
