"""Encodes large JSON values in pieces, so that no single step holds the interpreter for long.

The encoder of the standard library holds the interpreter for the whole of a value, in whatever thread it runs. Here it
sees small values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from json import JSONEncoder, encoder
from types import MappingProxyType
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

LARGE = 65_536
"""Characters of text, and values at `VALUE_COST` each, from which on a value is large."""
VALUE_COST = 16
PIECE_LENGTH = 65_536
MAX_DEPTH = 200
"""A value that is nested deeper is encoded at once: its encoder limits the depth."""
MAX_THREADS = 2
"""Large values that are encoded at a time: they share the interpreter, and each takes a multiple of its bytes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How JSON is written: the encoder of small values, and what it writes around them."""

    encode: Callable[[Any], str]
    quote: Callable[[str], str] = encoder.encode_basestring_ascii
    comma: str = ","
    colon: str = ":"

    def pieces(self, value: Any, depth: int = 0) -> Iterator[str]:
        """The JSON of a value in pieces; together they are what `encode` writes."""
        if not is_large(value) or depth > MAX_DEPTH:
            yield self.encode(value)
        elif type(value) is str:
            yield from self._string_pieces(value)
        elif type(value) is dict:
            yield "{"
            yield from self._join(self._dict_members(value, depth))
            yield "}"
        elif type(value) in (list, tuple):
            yield "["
            yield from self._join(self._list_members(value, depth))
            yield "]"
        else:
            yield self.encode(value)

    def _string_pieces(self, text: str) -> Iterator[str]:
        yield '"'
        for start in range(0, len(text), PIECE_LENGTH):
            yield self.quote(text[start : start + PIECE_LENGTH])[1:-1]
        yield '"'

    def _join(self, members: Iterator[Iterable[str]]) -> Iterator[str]:
        for number, member in enumerate(members):
            if number:
                yield self.comma
            yield from member

    def _list_members(self, items: Any, depth: int) -> Iterator[Iterable[str]]:
        """Members of a list: small ones many at once, each large one in pieces of its own."""
        batch: list[Any] = []
        batch_weight = 0
        for item in items:
            weight = measure(item, LARGE)
            if batch and batch_weight + weight > LARGE:
                yield (self.encode(batch)[1:-1],)
                batch, batch_weight = [], 0
            if weight > LARGE:
                yield self.pieces(item, depth + 1)
            else:
                batch.append(item)
                batch_weight += weight
        if batch:
            yield (self.encode(batch)[1:-1],)

    def _dict_members(self, items: dict[Any, Any], depth: int) -> Iterator[Iterable[str]]:
        batch: dict[Any, Any] = {}
        batch_weight = 0
        for key, item in items.items():
            weight = measure(item, LARGE) + (len(key) if type(key) is str else VALUE_COST)
            if batch and batch_weight + weight > LARGE:
                yield (self.encode(batch)[1:-1],)
                batch, batch_weight = {}, 0
            if weight > LARGE:
                yield self._large_member(key, item, depth)
            else:
                batch[key] = item
                batch_weight += weight
        if batch:
            yield (self.encode(batch)[1:-1],)

    def _large_member(self, key: Any, item: Any, depth: int) -> Iterator[str]:
        if type(key) is str:
            yield from self._string_pieces(key)
            yield self.colon
        else:
            yield self.encode({key: None})[1:-5]  # the key as the encoder writes it, without `null}`
        yield from self.pieces(item, depth + 1)


TEXT_STYLE = JsonStyle(JSONEncoder(ensure_ascii=False).encode, encoder.encode_basestring, ", ", ": ")
"""JSON for a policy, without escapes for printable characters."""


def is_large(value: Any, limit: int = LARGE) -> bool:
    """Whether encoding a value takes long; looks at no more of it than it takes to know, and calls nobody's methods."""
    return measure(value, limit) > limit


def measure(value: Any, limit: int) -> int:
    """About the size of a value, at most a little more than `limit`."""
    weight, stack = 0, [value]
    while stack and weight <= limit:
        item = stack.pop()
        kind = type(item)
        weight += VALUE_COST
        if kind in _TEXTS:
            weight += len(item)
        elif kind in _MAPPINGS:
            weight += VALUE_COST * len(item)
            if weight <= limit:
                weight += sum(len(key) for key in item if type(key) is str)
                stack.extend(item.values())
        elif kind in _LISTS:
            weight += VALUE_COST * len(item)
            if weight <= limit:
                stack.extend(item)
    return weight


_TEXTS = frozenset({str, bytes, bytearray})
_MAPPINGS = frozenset({dict, MappingProxyType})
_LISTS = frozenset({list, tuple})


def collect_pieces(pieces: Iterator[str]) -> list[bytes]:
    """The pieces as bytes, small ones joined."""
    collected: list[bytes] = []
    waiting: list[str] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= PIECE_LENGTH:
            collected.append("".join(waiting).encode())
            waiting, size = [], 0
    return [*collected, "".join(waiting).encode()] if waiting else collected


_threads: RunVar[anyio.CapacityLimiter] = RunVar("large_json_threads")


async def run_beside(function: Callable[..., T], *args: Any) -> T:
    """Runs work on a large value in a thread, of which there are few; cancelling abandons it."""
    limiter = _threads.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MAX_THREADS)
        _threads.set(limiter)
    return await to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=limiter)
