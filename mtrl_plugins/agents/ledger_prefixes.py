"""The ledgers up to the latest turns, so that a turn costs what it adds and not what came before."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from mtrl_plugins.agents.turn_tree import PolicyTurn
from trainer.ledger import Entry, Ledger

KEPT = 4
"""The latest branches are kept; each holds all its ids once."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    turn: PolicyTurn
    ledger: Ledger
    hasher: Any
    """Of the ledger's ids."""


class LedgerPrefixes:
    """The ledgers of one rollout's tree, up to a turn."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Prefix] = OrderedDict()
        """By the turn's `id`; the turn is held, so that no other can have it."""

    def find(self, turn: PolicyTurn | None) -> Ledger:
        """The ledger up to a turn; an empty one for None."""
        return self._find(turn).ledger if turn else Ledger()

    def digest(self, turn: PolicyTurn | None, entry: Entry) -> bytes:
        """A digest of the ids up to a turn and an entry after it."""
        hasher = self._find(turn).hasher.copy() if turn else sha256()
        hasher.update(_to_bytes(entry))
        digest: bytes = hasher.digest()
        return digest

    def add(self, turn: PolicyTurn, ledger: Ledger) -> None:
        """Keeps the ledger up to a new turn."""
        before = self._kept.get(id(turn.parent))
        if turn.parent is not None and before is None:
            return
        self._keep(turn, ledger, before.hasher.copy() if before else sha256(), (turn.prompt, turn.entry))

    def _find(self, turn: PolicyTurn) -> _Prefix:
        if id(turn) in self._kept:
            self._kept.move_to_end(id(turn))
            return self._kept[id(turn)]
        entries = tuple(entry for one in turn.path for entry in (one.prompt, one.entry))
        return self._keep(turn, Ledger(entries), sha256(), entries)

    def _keep(self, turn: PolicyTurn, ledger: Ledger, hasher: Any, new: tuple[Entry, ...]) -> _Prefix:
        for entry in new:
            hasher.update(_to_bytes(entry))
        self._kept[id(turn)] = prefix = _Prefix(turn, ledger, hasher)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return prefix


def _to_bytes(entry: Entry) -> bytes:
    return array("q", entry.ids).tobytes()
