"""A demo's tasks as data: as many as asked for, and each is made when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from trainer.demo.demos import Demo
from trainer.demo.problem import Split
from trainer.task import Task


@dataclass(frozen=True, slots=True)
class Drawn(Sequence[Task]):
    """The same tasks for the same seed, kind after kind; `columns["kind"]` says which kind a task is of."""

    demo: Demo
    seed: int
    size: int
    split: Split = "train"
    kinds: tuple[str, ...] = ()
    """All that the demo draws, where none is named."""

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        places = range(self.size)[index]
        return self._task(places) if isinstance(places, int) else [self._task(place) for place in places]

    def _task(self, place: int) -> Task:
        kinds = self.kinds or self.demo.kinds
        return self.demo.problem(self.seed, place, kinds[place % len(kinds)], self.split).task
