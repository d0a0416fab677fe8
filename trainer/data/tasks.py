"""All rows are read once, so that none is wrong, and each is read again when its turn comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import overload

from gateway.errors import ConfigError, ConfigErrors
from trainer.config import Columns
from trainer.data.plain import Row
from trainer.data.row import task_of
from trainer.data.rows import Rows, find
from trainer.data.shown import Shown
from trainer.task import Task

TOLD = 20
"""Wrong rows that are told one by one; the others are counted."""


def load(
    source: str | Path | Iterable[Row], *, system: str = "", split: str = "train", columns: Columns | None = None
) -> Tasks:
    """The tasks of a JSONL or parquet file, a saved data set's folder, a hub's data set, or rows.

    Several names have commas between them.

    `system` is said before every chat that does not begin with such a message; `split` is for data sets that have any;
    `columns` say where rows have their pictures.
    Raises ConfigErrors with all that is wrong.
    """
    return Tasks(find(source, split), system, columns)


class Tasks(Sequence[Task]):
    """The rows as tasks. An id that was made from a row is numbered where the row comes again."""

    def __init__(self, rows: Rows, system: str = "", columns: Columns | None = None) -> None:
        self._rows, self._system = rows, system
        self._shown = Shown(columns or Columns(), rows.folder)
        self._repeats: dict[int, int] = {}
        self._read_all()

    @property
    def name(self) -> str:
        return self._rows.name

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        numbers = range(len(self))[index]
        return self._task(numbers) if isinstance(numbers, int) else [self._task(number) for number in numbers]

    def __iter__(self) -> Iterator[Task]:
        return map(self._task, range(len(self)))

    def _task(self, number: int) -> Task:
        task = task_of(self._rows[number], self._rows.place(number), self._shown, self._system)
        if number not in self._repeats:
            return task
        id = f"{task.id}-{self._repeats[number]}"
        return replace(task, id=id, asked=replace(task.asked, id=id))

    def _read_all(self) -> None:
        if not len(self):
            raise ConfigError("holds no rows", file=self.name, remedy="write a row for each task")
        mistakes: list[ConfigError] = []
        seen: dict[str, tuple[int, int]] = {}
        wrong = 0
        for number in range(len(self)):
            try:
                self._meet(number, seen)
            except ConfigError as error:
                wrong += 1
                mistakes += [error] if wrong <= TOLD else []
        if wrong > TOLD:
            mistakes.append(ConfigError(f"{wrong - TOLD} more rows are wrong", file=self.name))
        if mistakes:
            raise ConfigErrors(mistakes)

    def _meet(self, number: int, seen: dict[str, tuple[int, int]]) -> None:
        """Notes the id's first row and how often it came; an id that somebody gave must be the row's own."""
        task = self._task(number)
        first, times = seen.get(task.id, (number, 0))
        seen[task.id] = first, times + 1
        if times and task.columns.get("id") is not None:
            problem = f"{task.id!r:.80} is also the id of {self._rows.place(first)}"
            remedy = "give each row an id of its own, or leave the column out"
            raise ConfigError(problem, file=task.place, field="id", remedy=remedy)
        if times:
            self._repeats[number] = times + 1
