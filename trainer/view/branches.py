"""Names the ledgers of a rollout: an agent's main line, side calls and forks; a history that was shortened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer.ledger import BRANCH, Author, Ledger
from trainer.rollout.rollout import Rollout


def name_branches(rollout: Rollout) -> tuple[str, ...]:
    """A name for each ledger; none if nobody has named any."""
    if "agent" not in rollout.infos:
        names = [next((str(entry.info.get(BRANCH, "")) for entry in ledger), "") for ledger in rollout.ledgers]
        return tuple(name or "the task's chat" for name in names) if any(names) else ()
    numbers = _turn_numbers(rollout)
    prefixes = [[ledger.ids[:end] for end in _turn_ends(ledger)] for ledger in rollout.ledgers]
    names = []
    for index, own in enumerate(prefixes[:-1]):
        others = {prefix for other, known in enumerate(prefixes) if other != index for prefix in known}
        shared = [prefix for prefix in own if prefix in others]
        names.append(f"fork of turn {numbers[shared[-1]]}" if shared else _name_unshared(rollout, index, numbers))
    return (*names, "main line")


def _name_unshared(rollout: Rollout, index: int, numbers: Mapping[tuple[int, ...], int]) -> str:
    """A ledger without a turn of another one: a second answer to the main line's first prompt, or a side call."""
    own, main = rollout.ledgers[index], rollout.ledger
    is_retry = bool(own.entries and main.entries) and own.entries[0].ids == main.entries[0].ids
    first = next(_turn_ends(main), None) if is_retry else None
    return "side call" if first is None else f"retry of turn {numbers[main.ids[:first]]}"


def _turn_numbers(rollout: Rollout) -> dict[tuple[int, ...], int]:
    """The number of each turn, counted over all ledgers, by all ids up to its end."""
    numbers: dict[tuple[int, ...], int] = {}
    count = 0
    for ledger in rollout.ledgers:
        for start, entry in zip(ledger.starts, ledger, strict=True):
            if entry.author is Author.POLICY:
                numbers.setdefault(ledger.ids[: start + len(entry.ids)], count)
                count += 1
    return numbers


def _turn_ends(ledger: Ledger) -> Iterator[int]:
    for start, entry in zip(ledger.starts, ledger, strict=True):
        if entry.author is Author.POLICY or entry.source == BRANCH:
            yield start + len(entry.ids)
