"""Which task comes when is a function of the seed and of how many came before, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from trainer.task import Task


class Sampler(Iterator[Task]):
    """Every task once in an epoch, in an order of that epoch's own, or as they stand where there is no seed.

    `drawn` is all that must be kept to go on.
    """

    def __init__(
        self, tasks: Sequence[Task], *, seed: int | None = 0, epochs: int | None = None, drawn: int = 0
    ) -> None:
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
        task = self.at(self.drawn)
        self.drawn += 1
        return task

    def at(self, number: int) -> Task:
        """The task that is or was drawn after so many others."""
        epoch, place = divmod(number, len(self.tasks))
        if self.seed is None:
            return self.tasks[place]
        if self._epoch != epoch:
            self._epoch, self._order = epoch, order(len(self.tasks), self.seed, epoch)
        return self.tasks[self._order[place]]


def order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation, the same on every machine and in every version: only `random()` is promised to stay as it is."""
    draw = Random(f"{seed}/{epoch}").random  # noqa: S311 - an order, not a secret
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)
