"""Messages that were read before: agents send their whole chat each time, and only what is new costs anything."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trainer.ledger import Message

Read = Callable[[Any, str], Iterable[Message]]
"""Reads a protocol's message; its place is for errors."""


MOST_BYTES = 64 * 1024 * 1024
"""Of one session; beyond that it begins anew."""


class ReadMessage(dict[str, Any]):
    """A message that a session keeps, with its digest once that was needed."""

    __slots__ = ("key",)
    key: bytes


class MessageCache:
    """The messages that one session has read, by what was sent."""

    def __init__(self) -> None:
        self._messages: dict[bytes, tuple[Message, ...]] = {}
        self._size = 0

    def read_all(self, sent: Sequence[Any], name: str, read: Read) -> Iterator[Message]:
        """The messages of a list. Those that were read before are the same objects."""
        for index, one in enumerate(sent):
            place = f"{name}.{index}"
            try:
                known = marshal.dumps(one, 2)
            except ValueError:  # An image that was decoded already.
                yield from map(ReadMessage, read(one, place))
                continue
            if known not in self._messages:
                if self._size + len(known) > MOST_BYTES:
                    self.clear()
                self._size += len(known)
                self._messages[known] = tuple(map(ReadMessage, read(one, place)))
            yield from self._messages[known]

    def clear(self) -> None:
        """Forgets all messages."""
        self._messages.clear()
        self._size = 0
