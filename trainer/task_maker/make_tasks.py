"""Makes tasks: explores, executes each chain a second time, writes its question, counts what was dropped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio

from gateway.errors import ConfigError, unwrap_error
from trainer.task_maker.chain import Chain, Dropped
from trainer.task_maker.explore import Examples, Explorer, execute, find_spare_step
from trainer.task_maker.questions import MAX_QUESTION, tells_answer, write_question
from trainer.task_maker.random_policy import KnowsNothing, try_random_policies
from trainer.task_maker.rewording import Rewording
from trainer.task_maker.server_sessions import Server

BATCH = 8
"""Chains that are explored at once."""
ATTEMPTS_PER_TASK = 25
MIN_ATTEMPTS = 200
MAX_GOLD_RESULT = 2_000
"""Characters of a result that a row keeps beside its call."""


@dataclass(frozen=True)
class MakeSettings:
    """How many tasks of which levels."""

    n: int
    levels: tuple[int, ...] = (1, 2, 3)
    held_out: float = 0.2
    """The share of tasks that are held out."""
    seed: int = 0
    examples: Examples = field(default_factory=dict)


@dataclass
class Report:
    """Counts of one run of `make-tasks`."""

    explored: int = 0
    kept: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Tasks by level and split."""
    graded: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    tools: Counter[str] = field(default_factory=Counter)
    shared_values: int = 0
    """Values of held-out tasks that training tasks have; 0 by construction, and counted."""

    @property
    def total(self) -> int:
        return self.kept.total()


@dataclass(frozen=True)
class MadeTask:
    """A chain with its question."""

    chain: Chain
    question: str

    def row(self, number: int, server: Server) -> dict[str, Any]:
        """The row of a data file, which trains as it is."""
        chain = self.chain
        gold = [
            {"tool": step.tool, "arguments": step.arguments, "result": step.text[:MAX_GOLD_RESULT]}
            for step in chain.steps
        ]
        row: dict[str, Any] = {"id": f"{server.name}-{chain.split}-{number}", "prompt": self.question}
        row |= {"tools": list(server.specs), "kind": f"level {chain.level}", "level": chain.level}
        row |= {"split": chain.split, "gold": gold}
        if chain.state:
            row["state"] = chain.state
        if chain.end_state:
            row["end_state"] = dict(chain.end_state)
        if chain.answer is not None:
            row["ground_truth"] = chain.answer.text
        return row


Progress = Callable[[int, int, str], None]
"""Called with tasks made, tasks wanted, and what is being done."""


class TaskMaker:
    """Makes the tasks of a server. The same seed and server give the same tasks."""

    def __init__(self, server: Server, settings: MakeSettings, rewording: Rewording | None, progress: Progress) -> None:
        self._server, self._settings, self._rewording, self._progress = server, settings, rewording, progress
        self._explorer = Explorer(server, settings.seed, settings.examples)
        self._wanted = _quotas(settings)
        self._keys: set[str] = set()
        self.report = Report()

    async def make(self) -> list[MadeTask]:
        """The tasks; fewer than wanted where the server does not yield them. Raises ConfigError if there are none."""
        self._progress(0, self._settings.n, "surveying the server")
        await self._explorer.survey()
        self._progress(0, self._settings.n, "trying random calls")
        knows_nothing = await try_random_policies(self._explorer)
        made: list[MadeTask] = []
        most = max(MIN_ATTEMPTS, ATTEMPTS_PER_TASK * self._settings.n)
        numbers = iter(range(most))
        while len(made) < self._settings.n and (batch := self._next_batch(numbers)):
            for chain in await self._explore(batch):
                await self._settle(chain, knows_nothing, made)
            self._progress(len(made), self._settings.n, f"{self.report.dropped.total()} chains dropped")
        self.report.shared_values = _count_shared(made)
        if not made:
            raise ConfigError(_no_tasks_problem(self.report), remedy=NO_TASKS_REMEDY)
        return made

    def _next_batch(self, numbers: Iterator[int]) -> list[tuple[int, int, str]]:
        """Numbers, levels and splits of the next chains: those that are wanted most."""
        open_quotas = sorted(((left, key) for key, left in self._wanted.items() if left > 0), reverse=True)
        if not open_quotas:
            return []
        picks = [open_quotas[at % len(open_quotas)][1] for at in range(BATCH)]
        return [(number, level, split) for number, (level, split) in zip(numbers, picks, strict=False)]

    async def _explore(self, batch: Sequence[tuple[int, int, str]]) -> list[Chain | Dropped]:
        found: list[Chain | Dropped] = [Dropped("it did not end")] * len(batch)

        async def explore(at: int) -> None:
            try:
                chain = await self._explorer.explore(*batch[at])
                self._check_again(chain, *await execute(self._server, chain))
                if await find_spare_step(self._server, chain) is not None:
                    raise Dropped("one of its calls can be left out")
                found[at] = chain
            except Dropped as reason:
                found[at] = reason

        try:
            async with anyio.create_task_group() as tasks:
                for at in range(len(batch)):
                    tasks.start_soon(explore, at)
        except BaseExceptionGroup as group:
            raise unwrap_error(group) from group
        return found

    @staticmethod
    def _check_again(chain: Chain, results: Sequence[Any], end: Mapping[str, str]) -> None:
        if [step.result for step in chain.steps] != list(results):
            raise Dropped("its results differ when it is executed again")
        if chain.end_state and chain.end_state != end:
            raise Dropped("its end state differs when it is executed again")

    async def _settle(self, found: Chain | Dropped, knows_nothing: KnowsNothing, made: list[MadeTask]) -> None:
        """Keeps a chain as a task, or counts why not."""
        self.report.explored += 1
        try:
            if isinstance(found, Dropped):
                raise found
            self._explorer.learn_from(found)
            task = self._make_task(found, knows_nothing)
        except Dropped as reason:
            self.report.dropped[str(reason)] += 1
            return
        chain = task.chain
        if self._rewording is not None:
            task = MadeTask(chain, await self._rewording.reword(task.question, chain))
        made.append(task)
        self._keys.add(chain.key)
        self._wanted[chain.level, chain.split] -= 1
        self.report.kept[chain.level, chain.split] += 1
        tools = [step.tool for step in chain.steps]
        self.report.tools.update(tools)
        self._explorer.used.update(tools)
        graded = ["state"] * bool(chain.end_state) + ["answer"] * (chain.answer is not None)
        self.report.graded[" and ".join(graded)] += 1

    def _make_task(self, chain: Chain, knows_nothing: KnowsNothing) -> MadeTask:
        if chain.key in self._keys:
            raise Dropped("the same as another task")
        if self._wanted.get((chain.level, chain.split), 0) <= 0:
            raise Dropped("enough tasks of its level")
        if problem := knows_nothing.find_problem(chain):
            raise Dropped(problem)
        draw = Random(f"{self._settings.seed}/question/{chain.key}")  # noqa: S311 - not security-relevant
        question = write_question(chain, self._server.specs, draw)
        if len(question) > MAX_QUESTION:
            raise Dropped("its question is too long")
        if chain.answer is not None and tells_answer(question, chain.answer):
            raise Dropped("its question tells the answer")
        return MadeTask(chain, question)


NO_TASKS_REMEDY = (
    "give it a `state` with something in it, tools that read or change it, and `--examples` for arguments that no"
    " schema tells, such as SQL"
)


def _no_tasks_problem(report: Report) -> str:
    reasons = "; ".join(f"{reason} ({count})" for reason, count in report.dropped.most_common(3))
    return f"no chain of {report.explored} makes a task: {reasons or 'no call worked'}"


def _quotas(settings: MakeSettings) -> dict[tuple[int, str], int]:
    """How many tasks of each level and split are wanted."""
    held_out = round(settings.n * settings.held_out)
    quotas = {}
    for split, count in (("train", settings.n - held_out), ("held_out", held_out)):
        for at, level in enumerate(settings.levels):
            quotas[level, split] = count // len(settings.levels) + (at < count % len(settings.levels))
    return quotas


def _count_shared(made: Sequence[MadeTask]) -> int:
    values: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for task in made:
        values[task.chain.split] |= task.chain.values
    return len(values["train"] & values["held_out"])
