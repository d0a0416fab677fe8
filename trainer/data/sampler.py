"""Which task comes when is a function of the seed and of how many came before, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from trainer.task import Task


class Sampler(Iterator[Task]):
    """Every task once in an epoch, in an order of that epoch's own. `drawn` is all that must be kept to go on."""

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, epochs: int | None = None, drawn: int = 0) -> None:
        if not tasks:
            raise ValueError("there is no task to draw")
        self.tasks, self.seed, self.drawn = tasks, seed, drawn
        self._end = None if epochs is None else epochs * len(tasks)
        self._epoch, self._order = -1, [0]

    @property
    def epoch(self) -> int:
        """Of the next task, from 0."""
        return self.drawn // len(self.tasks)

    def __next__(self) -> Task:
        if self._end is not None and self.drawn >= self._end:
            raise StopIteration
        if self._epoch != self.epoch:
            self._epoch, self._order = self.epoch, order(len(self.tasks), self.seed, self.epoch)
        task = self.tasks[self._order[self.drawn % len(self.tasks)]]
        self.drawn += 1
        return task


def order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation, the same on every machine and in every version: only `random()` is promised to stay as it is."""
    draw = Random(f"{seed}/{epoch}").random  # noqa: S311 - an order, not a secret
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)
