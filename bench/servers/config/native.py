"""Native tools like those of the echo server."""

from __future__ import annotations

import json
from collections import Counter

import anyio

_counts: Counter[str] = Counter()
_all_arrived: list[anyio.Event] = []


async def echo(token: str) -> str:
    """Returns the token."""
    return token


def echo_in_thread(token: str) -> str:
    """Returns the token from a worker thread."""
    return token


async def hold(token: str, among: int) -> str:
    """Returns the token once `among` calls have arrived."""
    if not _all_arrived:
        _all_arrived.append(anyio.Event())
    _counts[token] += 1
    if _counts.total() >= among:
        _all_arrived[0].set()
    await _all_arrived[0].wait()
    return token


async def seen() -> str:
    """How often each token arrived at `hold`."""
    return json.dumps(_counts)
