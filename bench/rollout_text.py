"""A rollout as text between fences, with the author of each part before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def fence_rollout(entries: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a code block that shows the rollout."""
    return ["```text", *_lines(entries), "```"]


def _lines(entries: Iterable[Sequence[str]]) -> Iterator[str]:
    for author, text in entries:
        first, *more = text.rstrip("\n").splitlines() or [""]
        yield f"{author:<9}{first}".rstrip()
        yield from (f"{'':9}{line}".rstrip() for line in more)
