"""What is too much for one pass is cut between rows, always at the same places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def micro(sizes: Sequence[int], tokens: int) -> Iterator[slice]:
    """Neighbours with no more than so many tokens together; a longer row goes alone."""
    start, held = 0, 0
    for place, size in enumerate(sizes):
        if place > start and held + size > tokens:
            yield slice(start, place)
            start, held = place, 0
        held += size
    if sizes:
        yield slice(start, len(sizes))


def shares(rows: int, parts: int) -> Iterator[slice]:
    """As even as can be, and none of them empty."""
    parts = min(parts, rows)
    for part in range(parts):
        yield slice(rows * part // parts, rows * (part + 1) // parts)
