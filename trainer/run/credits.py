"""What a step made of each token that was written: a line of JSON a step, and the latest line of a step counts.

    {"step": 3, "rollouts": {"3-0-5/sum-17/2": [[[34, 0, 0], [12, 0.71, 1]], ...]}}

Of a rollout, by its name, each ledger in which the policy wrote, in order; of a ledger `[tokens, advantage, weight]`
for tokens in a row that have both in common. A weight of 0 is no part of what is learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import groupby
from math import inf, isfinite
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Protocol

from trainer.run.rollout import Rollout

NAME = "credits.jsonl"
STEP = re.compile(r"(\d+)-\d+-\d+$")
"""A group of a training run is called `step-draw-number`, unless its rollouts say which step learned from them."""
LINE = re.compile(rb'\{"step":(\d+),')
"""How `dump` begins it."""
Credit = tuple[int, float, float]
"""So many tokens, the advantage of each, and its weight."""


class Weighed(Protocol):
    """A ledger with what its tokens are worth."""

    @property
    def name(self) -> str:
        """Its rollout's."""
        ...

    @property
    def advantages(self) -> Sequence[float]: ...

    @property
    def weights(self) -> Sequence[float]: ...


def dump(step: int, rows: Iterable[Weighed]) -> bytes:
    """The line, its end included."""
    told: dict[str, list[list[Credit]]] = {}
    for row in rows:
        told.setdefault(row.name, []).append(_runs(row))
    return json.dumps({"step": step, "rollouts": told}, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    ) + (b"\n")


def cut(file: Path, step: float = inf) -> None:
    """Back to its last whole line, and to that of this step: what later ones said, they will say anew."""
    if not file.exists():
        return
    end = 0
    with file.open("r+b") as opened:
        for line in opened:
            begins = LINE.match(line)
            if not line.endswith(b"\n") or (begins and int(begins[1]) > step):
                break
            end += len(line)
        opened.truncate(end)


def _runs(row: Weighed) -> list[Credit]:
    alike = groupby(zip(row.advantages, row.weights, strict=True))
    return [
        (sum(1 for _ in tokens), _short(advantage) if weight else 0.0, _short(weight))
        for (advantage, weight), tokens in alike
    ]


def _short(value: float) -> float:
    """As many digits as a person reads; what is no number is told elsewhere, and loudly."""
    return float(f"{value:.6g}") if isfinite(value) else 0.0


def step_of(rollout: Rollout) -> int | None:
    """The step that it was made for, or that learned from it; 0 where it was made for none, and none took it."""
    named = STEP.match(rollout.group)
    return int(named[1]) if rollout.step is None and named else rollout.step


class Credits:
    """Reads them, whoever writes meanwhile; each step's line is found once and read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / NAME
        self._lock = Lock()
        self._places: dict[int, tuple[int, int]] = {}
        self._end = 0

    @property
    def steps(self) -> Set[int]:
        """Those that told what they made of their tokens."""
        return self._find().keys()

    def of_rollout(self, rollout: Rollout) -> list[list[Credit]] | None:
        step = step_of(rollout)
        return None if step is None else self.of(step, rollout.name)

    def of(self, step: int, rollout: str) -> list[list[Credit]] | None:
        """None where nothing was learned from it."""
        place = self._find().get(step)
        if place is None:
            return None
        try:
            with self.file.open("rb") as opened:
                opened.seek(place[0])
                told: Mapping[str, list[list[Credit]]] = json.loads(opened.read(place[1]))["rollouts"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # It is a help for reading, and a rollout can be read without.
        return told.get(rollout)

    def _find(self) -> Mapping[int, tuple[int, int]]:
        with self._lock:
            with suppress(OSError), self.file.open("rb") as opened:
                self._look(opened)
            return dict(self._places)

    def _look(self, opened: BinaryIO) -> None:
        if opened.seek(0, 2) < self._end or not self._same(opened):
            self._places, self._end = {}, 0
        opened.seek(self._end)
        for line in opened:
            if not line.endswith(b"\n"):
                return
            head = line[: line.find(b",")].removeprefix(b'{"step":')
            if head.isdigit():
                self._places[int(head)] = (self._end, len(line))
            self._end += len(line)

    def _same(self, opened: BinaryIO) -> bool:
        """Whether the last step that was found still stands where it was: a run may be made anew in its folder."""
        if not self._places:
            return True
        step, (start, _) = max(self._places.items(), key=lambda one: one[1])
        head = b'{"step":%d,' % step
        opened.seek(start)
        return opened.read(len(head)) == head
