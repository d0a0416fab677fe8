"""The native counterpart of the echo server."""

from __future__ import annotations

import json
from collections import Counter

import anyio

_seen: Counter[str] = Counter()
_all_here: list[anyio.Event] = []


async def echo(token: str) -> str:
    """Says the token again."""
    return token


def echo_in_thread(token: str) -> str:
    """Says the token again, from a worker thread."""
    return token


async def hold(token: str, among: int) -> str:
    """Says the token again once `among` calls are here."""
    if not _all_here:
        _all_here.append(anyio.Event())
    _seen[token] += 1
    if _seen.total() >= among:
        _all_here[0].set()
    await _all_here[0].wait()
    return token


async def seen() -> str:
    """How often each token came to `hold`."""
    return json.dumps(_seen)
