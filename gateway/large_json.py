"""Measures values, and encodes large ones as JSON in pieces, between which other threads get the interpreter.

The encoder of the standard library holds the interpreter for the whole of a value, in whatever thread it runs: 240 ms
for 16 MB of control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from json import JSONEncoder
from types import MappingProxyType
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

LARGE = 65_536
"""Characters of text, and values at `VALUE_COST` each, from which on a value is large."""
VALUE_COST = 16
PIECE_LENGTH = 65_536
MAX_THREADS = 2
"""Large values that are encoded, or parsed, at a time: they share the interpreter, and each takes a multiple of its
bytes."""

T = TypeVar("T")

TEXT_ENCODER = JSONEncoder(ensure_ascii=False)
"""Writes JSON for a policy, without escapes for printable characters."""


def write_json(encoder: JSONEncoder, value: Any) -> str:
    """What `encoder.encode` writes; large values belong into a thread."""
    return "".join(_encode_pieces(encoder, value)) if is_large(value) else encoder.encode(value)


def _encode_pieces(encoder: JSONEncoder, value: Any) -> Iterator[str]:
    kind = type(value)
    if kind is str and len(value) > PIECE_LENGTH:
        yield '"'
        for start in range(0, len(value), PIECE_LENGTH):
            yield encoder.encode(value[start : start + PIECE_LENGTH])[1:-1]
        yield '"'
    elif kind is dict and is_large(value):
        for number, (key, item) in enumerate(value.items()):
            yield encoder.item_separator if number else "{"
            if type(key) is str:
                yield from _encode_pieces(encoder, key)
                yield encoder.key_separator
            else:
                yield encoder.encode({key: 0})[1:-2]
            yield from _encode_pieces(encoder, item)
        yield "}"
    elif kind in _LISTS and is_large(value):
        for number, item in enumerate(value):
            yield encoder.item_separator if number else "["
            yield from _encode_pieces(encoder, item)
        yield "]"
    else:
        yield encoder.encode(value)


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

Threads = RunVar[anyio.CapacityLimiter]
_threads: Threads = RunVar("large_json_threads")


async def run_beside(function: Callable[..., T], *args: Any, threads: Threads = _threads) -> T:
    """Runs work on a large value in a thread, of which there are few; cancelling abandons it."""
    limiter = threads.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(MAX_THREADS)
        threads.set(limiter)
    return await to_thread.run_sync(function, *args, abandon_on_cancel=True, limiter=limiter)
