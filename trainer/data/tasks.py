"""Loads rows as tasks and checks them all at the start; samples tasks by epoch; checks the names of tools in rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, overload

from gateway.config.diagnostics import closest_match
from gateway.errors import ConfigError, ConfigErrors
from gateway.plugins import find_all, find_missing, load_name
from gateway.types import Task as SessionTask
from gateway.types import ToolSpec
from trainer.data.dataset import RowSource, open_rows
from trainer.data.row_media import Row, RowMedia, UnloadedMedia
from trainer.data.row_to_task import row_to_task
from trainer.rollout.settings import ColumnSettings
from trainer.rollout.task import Task

if TYPE_CHECKING:
    from trainer.train.settings import TrainSettings


WarmStartProgress = Callable[[int, int, float], None]
"""Called with the step, the number of steps, and the loss."""
CHECKED_TASKS = 20
"""Tasks of an example that are checked; all are alike."""


class Example(Protocol):
    """Generated tasks, and a model that is built for them."""

    tools: Path | None
    """The tools that its tasks need, for runs that name none."""

    def make_tasks(self, settings: TrainSettings, *, held_out: bool) -> Sequence[Task]:
        """Its tasks, for training or for evaluation."""
        ...

    def prepare_model(self, settings: TrainSettings, report: WarmStartProgress) -> Path:
        """The folder of its model, which is built if it does not exist yet."""
        ...


def example_names() -> frozenset[str]:
    """The names of all examples."""
    return frozenset(find_all(lambda plugin: plugin.examples))


def load_example(name: str) -> Example:
    """The example of a name, whose module is imported."""
    example: Example = load_name(find_all(lambda plugin: plugin.examples)[name])
    return example


def require_example(name: str, field: str) -> None:
    """Raises ConfigError if the name is that of an example whose plug-in is missing."""
    if name not in example_names() and (plugin := find_missing(name)) and not Path(name).exists():
        remedy = f"install it, or name a `{field}` of your own"
        raise ConfigError(f"{name!r} needs the plug-in {plugin!r}, which is not installed", field=field, remedy=remedy)


INTERACTION_PREFIX = "feedback_"
"""The prefix of interactions among the gateway's tools."""
DEFAULT_INTERACTION = "gsm8k"
FieldName = tuple[str, str]
"""A field, and the name in it."""


class TaskNames(NamedTuple):
    """The names in a task that the gateway has to know. Most rows of a data set have the same."""

    tools: tuple[str, ...] | None
    create: tuple[str, ...]
    feedback: str | None
    has_feedback_args: bool
    state: str
    hash_state: bool

    @classmethod
    def of(cls, task: SessionTask) -> TaskNames:
        tools, create = None if task.tools is None else tuple(task.tools), tuple(task.create)
        return cls(tools, create, task.feedback, bool(task.feedback_args), task.state, task.hash_state)


class FoundNames(dict[TaskNames, tuple[str, int]]):
    """The location of the first task with some names, and how many have them."""

    def add(self, task: Task) -> None:
        names = TaskNames.of(task.session_task)
        location, count = self.get(names, (task.location, 0))
        self[names] = location, count + 1


def find_names(tasks: Iterable[Task]) -> FoundNames:
    """The names in tasks; those of rows were found as they were checked."""
    if isinstance(tasks, RowTasks):
        return tasks.names
    names = FoundNames()
    for task in tasks:
        names.add(task)
    return names


def check_task_names(tasks: Iterable[Task], specs: Sequence[ToolSpec]) -> list[ConfigError]:
    """One error for each tool or interaction that the gateway does not offer: its first row, and how many have it."""
    offered = OfferedNames(specs)
    found = count_rows(tasks, offered.find_unknown)
    return [offered.unknown_name_error(unknown, *rows) for unknown, rows in found.items()]


Mistake = TypeVar("Mistake")


def count_rows(tasks: Iterable[Task], find: Callable[[TaskNames], Iterable[Mistake]]) -> dict[Mistake, tuple[str, str]]:
    """The mistakes that are found in names, each with the location of its first row, and how many more have it in
    words."""
    first: dict[Mistake, str] = {}
    rows: Counter[Mistake] = Counter()
    for names, (location, count) in find_names(tasks).items():
        for mistake in find(names):
            first.setdefault(mistake, location)
            rows[mistake] += count
    return {mistake: (location, _describe_others(rows[mistake] - 1)) for mistake, location in first.items()}


def _describe_others(others: int) -> str:
    return f" ({others} more row{'s name' if others > 1 else ' names'} it)" if others else ""


def suggest_name(name: str, known: Sequence[str]) -> str:
    """The remedy for a name that is none of those that are known."""
    close = closest_match(name, known)
    return f"did you mean {close!r}?" if close else f"known are: {', '.join(sorted(known)) or 'none'}"


class OfferedNames:
    """The names of a gateway's tools and interactions."""

    def __init__(self, specs: Sequence[ToolSpec]) -> None:
        self.tools = tuple(spec.name for spec in specs if spec.audience == "policy")
        loop = (spec.name for spec in specs if spec.audience == "loop")
        self.interactions = tuple(
            name.removeprefix(INTERACTION_PREFIX) for name in loop if name.startswith(INTERACTION_PREFIX)
        )

    def find_unknown(self, task: TaskNames) -> Iterator[FieldName]:
        for name in task.tools or ():
            if name not in self.tools:
                yield "tools", name
        for name in task.create:
            if name not in self.tools:
                yield "tools_kwargs", name
        if task.feedback is not None and task.feedback not in self.interactions:
            yield "interaction_kwargs.name", task.feedback
        elif task.feedback is None and task.has_feedback_args and not self.has_default_interaction:
            yield "interaction_kwargs.name", ""

    @property
    def has_default_interaction(self) -> bool:
        """Whether an interaction can be left unnamed."""
        return DEFAULT_INTERACTION in self.interactions or len(self.interactions) == 1

    def unknown_name_error(self, unknown: FieldName, location: str, more: str) -> ConfigError:
        field, name = unknown
        kind, known = ("tool", self.tools) if field.startswith("tools") else ("interaction", self.interactions)
        missing = f"is missing, and there is no {DEFAULT_INTERACTION!r}"
        problem = f"the gateway offers no {kind} {name!r:.80}" if name else missing
        return ConfigError(problem + more, file=location, field=field, remedy=suggest_name(name, known))


def iterate_texts(tasks: Sequence[Task]) -> Iterator[Task]:
    """The tasks for checks that need no media; those of rows are read without them."""
    return tasks.iterate_texts() if isinstance(tasks, RowTasks) else iter(tasks)


class TaskSampler(Iterator[Task]):
    """Draws every task once per epoch, shuffled again in each, or in order if there is no seed.

    The order depends only on the seed and on `drawn`, the number of tasks drawn so far, which is its whole state.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int | None = 0) -> None:
        if not tasks:
            raise ValueError("there are no tasks to draw")
        self.tasks, self.seed, self.drawn = tasks, seed, 0
        self._epoch, self._order = -1, [0]

    def __next__(self) -> Task:
        task = self.task_at(self.drawn)
        self.drawn += 1
        return task

    def task_at(self, number: int) -> Task:
        """The task with this number in the order of draws."""
        epoch, index = divmod(number, len(self.tasks))
        if self.seed is None:
            return self.tasks[index]
        if self._epoch != epoch:
            self._epoch, self._order = epoch, epoch_order(len(self.tasks), self.seed, epoch)
        return self.tasks[self._order[index]]


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation that is the same on every machine and in every Python version, as only `random()` guarantees."""
    draw = Random(f"{seed}/{epoch}").random  # noqa: S311 - not security-relevant
    keys = [draw() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


MAX_ROW_ERRORS = 20
"""Invalid rows that are listed; further ones are only counted."""


def require_valid(rows: RowSource, check: Callable[[int], object]) -> None:
    """Checks each row by its number. Raises ConfigErrors with all that is wrong."""
    if not len(rows):
        raise ConfigError("has no rows", file=rows.name, remedy="write some")
    errors: list[ConfigError] = []
    more = 0
    for number in range(len(rows)):
        try:
            check(number)
        except ConfigError as error:
            if len(errors) < MAX_ROW_ERRORS:
                errors.append(error)
            else:
                more += 1
    if more:
        errors.append(ConfigError(f"{more} more rows are invalid", file=rows.name))
    if errors:
        raise ConfigErrors(errors)


def load_rows(
    source: str | Path | Iterable[Row], *, system: str = "", split: str = "train", columns: ColumnSettings | None = None
) -> RowTasks:
    """Loads the tasks of a JSONL or parquet file, a saved data set's folder, a hub's data set, or rows.

    Several sources may be named, separated by commas. `system` is put before chats without a system message; `split` is
    for data sets that have splits (for `test`, `validation` will do); `columns` names the columns with media. Raises
    ConfigErrors with all that is wrong.
    """
    return RowTasks(open_rows(source, split), system, columns)


class LazyTasks(Sequence[Task]):
    """Tasks that are read whenever they are drawn."""

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        numbers = range(len(self))[index]
        return self._read(numbers) if isinstance(numbers, int) else [self._read(number) for number in numbers]

    def __iter__(self) -> Iterator[Task]:
        return map(self._read, range(len(self)))

    def _read(self, number: int) -> Task:
        raise NotImplementedError


class RowTasks(LazyTasks):
    """Rows as tasks. All are checked at the start, and each is read again when it is drawn. Ids that were made from
    rows are numbered where a row is repeated."""

    def __init__(self, rows: RowSource, system: str = "", columns: ColumnSettings | None = None) -> None:
        self._rows, self._system = rows, system
        self._media = RowMedia(columns or ColumnSettings(), rows.folder)
        self._repeats: dict[int, int] = {}
        self.names = FoundNames()
        self._check_all()

    @property
    def name(self) -> str:
        return self._rows.name

    def __len__(self) -> int:
        return len(self._rows)

    def iterate_texts(self) -> Iterator[Task]:
        """The tasks without their media, in whose places there are empty parts, and without ids made from rows."""
        media = UnloadedMedia(self._media.columns, self._media.folder)
        for number in range(len(self)):
            yield row_to_task(self._rows[number], self._rows.location(number), media, self._system)

    def _read(self, number: int) -> Task:
        task = row_to_task(self._rows[number], self._rows.location(number), self._media, self._system)
        if number not in self._repeats:
            return task
        id = f"{task.id}-{self._repeats[number]}"
        return replace(task, id=id, session_task=replace(task.session_task, id=id))

    def _check_all(self) -> None:
        seen: dict[str, tuple[int, int]] = {}
        require_valid(self._rows, lambda number: self._check_row(number, seen))

    def _check_row(self, number: int, seen: dict[str, tuple[int, int]]) -> None:
        """Reads a row, and records its id's first row and count; ids in the data must be unique."""
        task = self._read(number)
        first, count = seen.get(task.id, (number, 0))
        seen[task.id] = first, count + 1
        self.names.add(task)
        if count and task.columns.get("id") is not None:
            problem = f"{task.id!r:.80} is also the id of {self._rows.location(first)}"
            remedy = "give each row a unique id, or leave the column out"
            raise ConfigError(problem, file=task.location, field="id", remedy=remedy)
        if count:
            self._repeats[number] = count + 1
