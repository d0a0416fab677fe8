"""A stream is cut at its line ends in linear time, and never is more held of it than one bounded line."""

from __future__ import annotations

from dataclasses import dataclass

_KEPT = 256


@dataclass(frozen=True, slots=True)
class TooLong:
    """What is left of a line that was too long to be kept: enough to find whose answer it was."""

    head: bytes
    tail: bytes


class Lines:
    def __init__(self, most: int) -> None:
        self._most, self._size, self._chunks = most, 0, list[bytes]()
        self._head: bytes | None = None
        """Of a line too long to keep; then `_chunks` holds only its end."""

    def feed(self, chunk: bytes) -> list[bytes | TooLong]:
        """The lines that end in this chunk."""
        *ended, rest = chunk.split(b"\n")
        found = [self._end(part) for part in ended]
        if rest:
            self._add(rest)
        return found

    def _add(self, part: bytes) -> None:
        self._chunks.append(part)
        self._size += len(part)
        if self._size > self._most:
            if self._head is None:
                self._head = b"".join(self._chunks)[:_KEPT]
            self._chunks = [b"".join(self._chunks[-2:])[-_KEPT:]]

    def _end(self, part: bytes) -> bytes | TooLong:
        self._add(part)
        line, head = b"".join(self._chunks), self._head
        self._chunks, self._size, self._head = [], 0, None
        return line if head is None else TooLong(head, line)


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event; `data` is what is left of it where it was too long."""

    kind: str
    data: bytes | TooLong
    id: str


class Events:
    """Server-sent events out of chunks."""

    def __init__(self, most: int) -> None:
        self._lines = Lines(most)
        self._most = most
        self._kind, self._data, self._size = "", list[bytes](), 0
        self._cut: TooLong | None = None
        self.last_id = ""
        self.retry_s: float | None = None

    def feed(self, chunk: bytes) -> list[Event]:
        return [event for line in self._lines.feed(chunk) if (event := self._line(line)) is not None]

    def _line(self, line: bytes | TooLong) -> Event | None:
        if isinstance(line, TooLong):
            self._cut = TooLong(line.head.removeprefix(b"data:"), line.tail)
            return None
        line = line.removesuffix(b"\r")
        if not line:
            return self._end()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._keep(value)
            case b"event":
                self._kind = value.decode("utf-8", "replace")
            case b"id" if b"\0" not in value:
                self.last_id = value.decode("utf-8", "replace")
            case b"retry" if value.isdigit() and len(value) < 9:
                self.retry_s = int(value) / 1000
        return None

    def _keep(self, value: bytes) -> None:
        self._size += len(value)
        if self._size > self._most:
            self._cut = TooLong(b"".join(self._data)[:_KEPT], value[-_KEPT:])
            self._data = []
        else:
            self._data.append(value)

    def _end(self) -> Event | None:
        kind, data, cut = self._kind or "message", self._data, self._cut
        self._kind, self._data, self._size, self._cut = "", [], 0, None
        if cut is not None:
            return Event(kind, cut, self.last_id)
        return Event(kind, b"\n".join(data), self.last_id) if data else None
