"""Framing of JSON-RPC messages: bounded lines, server-sent events, and what of them is for the dispatcher.

Splitting takes linear time and holds at most one bounded line. Data that is no message is dropped; an invalid
response becomes an error for the request it answers.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from mcp.shared.dispatcher import coerce_request_id
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCResponse

from gateway.bounded_json import MAX_VALUES
from gateway.mcp_client.dispatcher import Dispatcher
from gateway.mcp_client.errors import record_cut
from gateway.mcp_client.flood_limits import (
    ENDLESS_LINE_BYTES,
    EVENT_S,
    LINE_COST,
    LINE_S,
    CommentBudget,
    Pacer,
    StreamFlood,
    split_pieces,
)
from gateway.mcp_client.messages import (
    EDGE_BYTES,
    UnreadableMessageError,
    error_response,
    find_mistake,
    find_request_id,
    read_messages,
)


@dataclass(frozen=True, slots=True)
class OversizedLine:
    """Both ends of a line that was too long to keep: enough to find the id of the request it answers."""

    head: bytes
    tail: bytes


class LineSplitter:
    """Splits a stream of small chunks into lines of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._size, self._kept = max_bytes, 0, bytearray()
        self._head: bytes | None = None
        """The start of a line that is too long; `_kept` then holds only its end."""

    def feed(self, chunk: bytes) -> list[bytes | OversizedLine]:
        """The lines that end in this chunk; raises `StreamFlood` for one that does not end."""
        *complete, rest = chunk.split(b"\n")
        lines = [self._end(part) for part in complete]
        if rest:
            self._add(rest)
            if self._size > (limit := self._max_bytes + ENDLESS_LINE_BYTES):
                record_cut("line")
                raise StreamFlood(f"the server sent a line of more than {limit} bytes")
        return lines

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        self._kept += part
        if self._size > self._max_bytes:
            if self._head is None:
                self._head = bytes(self._kept[:EDGE_BYTES])
            self._kept = self._kept[-EDGE_BYTES:]

    def _end(self, part: bytes) -> bytes | OversizedLine:
        if not self._size and len(part) <= self._max_bytes:
            return part
        self._add(part)
        line, head = bytes(self._kept), self._head
        self._kept, self._size, self._head = bytearray(), 0, None
        return line if head is None else OversizedLine(head, line)


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """A server-sent event."""

    event_type: str
    data: bytes | OversizedLine
    id: str


_MAX_ID_BYTES = 1024
_BOM = b"\xef\xbb\xbf"
_HEADER_VALUE = re.compile(rb"[\x21-\x7e\x80-\xff](?:[\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?")


class EventParser:
    """Parses server-sent events from a stream of chunks.

    Every byte counts: those of an event towards `max_bytes`, all others towards a budget for comments.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lines = LineSplitter(max_bytes)
        self._max_bytes = max_bytes
        self._event_type, self._data, self._has_data, self._size = "", bytearray(), False, 0
        self._fields_cost = 0
        self._oversized: OversizedLine | None = None
        self._comments = CommentBudget()
        self._is_first, self._after_return = True, False
        self.last_id = ""
        """The id to resume the stream from; empty if the last one cannot be sent in a header."""
        self.retry_s: float | None = None

    async def read(self, chunk: bytes, pacer: Pacer) -> AsyncGenerator[ServerSentEvent]:
        """The events that end in this chunk, with pauses between them where there is much to parse."""
        for piece in split_pieces(chunk):
            await pacer.work(piece.count(b"\n") * LINE_S)
            for event in self.feed(piece):
                await pacer.work(EVENT_S)
                yield event

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that end in this chunk; raises `StreamFlood`. Lines end with any of the three line ends."""
        if self._after_return:
            chunk = chunk.removeprefix(b"\n")
        if b"\r" in chunk:
            self._after_return = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        elif chunk:
            self._after_return = False
        return [event for line in self._lines.feed(chunk) if (event := self._parse_line(line)) is not None]

    def _parse_line(self, line: bytes | OversizedLine) -> ServerSentEvent | None:
        if isinstance(line, OversizedLine):
            self._add_oversized(line)
            return None
        if self._is_first:
            self._is_first, line = False, line.removeprefix(_BOM)
        if not line:
            return self._end()
        name, _, value = line.partition(b":")
        if not name:
            self._comments.spend(len(line) + LINE_COST)
            return None
        value = value.removeprefix(b" ")
        if name == b"data":
            self._add_data(value)
            return None
        self._add_size(len(line) + 1)
        self._fields_cost += len(line) + LINE_COST
        match name:
            case b"event":
                self._event_type = value[:EDGE_BYTES].decode("utf-8", "replace")
            case b"id" if b"\0" not in value:
                self.last_id = _to_resumable_id(value)
            case b"retry" if value.isdigit() and len(value) < 9:
                self.retry_s = int(value) / 1000
        return None

    def _add_oversized(self, line: OversizedLine) -> None:
        if line.head.startswith(b"data:"):
            self._oversized = OversizedLine(line.head.removeprefix(b"data:"), line.tail)
            self._has_data = True
        else:
            self._comments.spend(self._max_bytes)

    def _add_data(self, value: bytes) -> None:
        self._has_data = True
        self._add_size(len(value) + 1 + (0 if value else LINE_COST), value)
        if self._oversized is None:
            self._data += value + b"\n"

    def _add_size(self, size: int, value: bytes = b"") -> None:
        self._size += size
        if self._size > self._max_bytes and self._oversized is None:
            self._oversized = OversizedLine(bytes(self._data[:EDGE_BYTES]), value[-EDGE_BYTES:])
            self._data = bytearray()
        if self._oversized is not None:
            self._comments.spend(LINE_COST)
            if self._size > self._max_bytes + ENDLESS_LINE_BYTES:
                record_cut("event")
                raise StreamFlood(f"the server sent an event of more than {self._size} bytes")

    def _end(self) -> ServerSentEvent | None:
        event_type, data, oversized = self._event_type or "message", self._data, self._oversized
        has_data, fields_cost = self._has_data, self._fields_cost
        self._event_type, self._data, self._has_data, self._size = "", bytearray(), False, 0
        self._oversized, self._fields_cost = None, 0
        if not has_data:
            self._comments.spend(fields_cost + LINE_COST)
            return None
        return ServerSentEvent(event_type, oversized or bytes(data[:-1]), self.last_id)


def _to_resumable_id(value: bytes) -> str:
    """An event's id, or nothing if it is too long for a header or has bytes that headers may not have."""
    is_header = len(value) <= _MAX_ID_BYTES and _HEADER_VALUE.fullmatch(value)
    return value.decode("utf-8", "replace") if is_header else ""


class Inbox:
    """Where an HTTP transport puts what it has read, for the dispatcher."""

    def __init__(
        self, dispatcher: Dispatcher, max_bytes: int, max_values: int = MAX_VALUES, *, takes_any_id: bool = False
    ) -> None:
        """`takes_any_id`: answers may come on any stream; else only on that of their request."""
        self.dispatcher, self.max_bytes, self.max_values = dispatcher, max_bytes, max_values
        self._takes_any_id = takes_any_id

    async def put_messages(self, data: bytes, request_id: str | int | None = None) -> bool:
        """Queues the messages in `data`; whether one answers `request_id`. An error without an id counts as one."""
        try:
            messages = await read_messages(data, self.max_values)
        except UnreadableMessageError as error:
            if error.request_id is None:
                self.dispatcher.note_unreadable(str(error))
                return False
            messages = [error_response(error.request_id, str(error))]
        if not messages and (mistake := find_mistake(data)) is not None:
            self.dispatcher.note_unreadable(mistake)
        return await self.put_all(messages, request_id)

    async def put_all(self, messages: Sequence[JSONRPCMessage], request_id: str | int | None = None) -> bool:
        """Queues messages; whether one answers `request_id`. Answers to other requests are left out."""
        is_answered = False
        for message in messages:
            if isinstance(message, JSONRPCResponse | JSONRPCError) and not self._takes_any_id:
                if message.id is None and isinstance(message, JSONRPCError):
                    message.id = request_id
                if message.id is None or coerce_request_id(message.id) != request_id:
                    self.dispatcher.note_unreadable(
                        f"it answers the id {message.id!r}, which is not that of the request"
                    )
                    continue
                is_answered = True
            await self.dispatcher.receive(message)
        return is_answered

    async def put_event(self, event: ServerSentEvent, request_id: str | int | None = None) -> bool:
        if event.event_type != "message":
            return False
        if not isinstance(event.data, OversizedLine):
            return await self.put_messages(event.data, request_id)
        owner_id = request_id if request_id is not None else find_request_id(event.data.head, event.data.tail)
        await self.dispatcher.receive(error_response(owner_id, self.too_large_message))
        return owner_id == request_id

    @property
    def too_large_message(self) -> str:
        return f"the answer is too large: more than {self.max_bytes} bytes"
