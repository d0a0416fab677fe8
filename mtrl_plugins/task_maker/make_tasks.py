"""Makes tasks: explores, executes each chain a second time, writes its question, counts what was dropped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any

from gateway.errors import ConfigError
from mtrl_plugins.task_maker.chain import Chain, check_again, find_shorter
from mtrl_plugins.task_maker.explore import Examples, Explorer, KnowsNothing, try_random_policies
from mtrl_plugins.task_maker.questions import MAX_QUESTION, tells_answer, write_question
from mtrl_plugins.task_maker.server_sessions import AT_ONCE, Dropped, Server, run_concurrently
from mtrl_plugins.task_maker.values import split_of

MOST_WITHOUT = 200
"""Chains without a new task after which the server is taken to have no more."""
MAX_ASCII = 127
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
    answers_only: bool = False
    """Whether tasks are left out that a state grades, or whose answer no shell compares."""


@dataclass
class Report:
    """Counts of one run of `make-tasks`."""

    explored: int = 0
    kept: Counter[tuple[int, str]] = field(default_factory=Counter)
    """Tasks by level and split."""
    graded: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    tools: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.kept.total()


@dataclass(frozen=True)
class MadeTask:
    """A chain with its question."""

    chain: Chain
    question: str

    def without_results(self) -> MadeTask:
        """The task without what only its making needs: many have to fit into memory."""
        steps = (replace(step, result=None, text=step.text[:MAX_GOLD_RESULT]) for step in self.chain.steps)
        return replace(self, chain=replace(self.chain, steps=tuple(steps)))

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

    def __init__(self, server: Server, settings: MakeSettings, progress: Progress) -> None:
        self.server, self._settings, self._progress = server, settings, progress
        self._explorer = Explorer(server, settings.seed, settings.examples)
        self._wanted = _quotas(settings)
        self._keys: set[str] = set()
        self._knows_nothing = KnowsNothing({}, {})
        self._without = 0
        """Chains since the last new task."""
        self.made: list[MadeTask] = []
        self.report = Report()

    async def make(self) -> None:
        """Makes the tasks into `made`: fewer than wanted where the server does not yield them.

        Raises ConfigError if there are none.
        """
        await self._explorer.survey(lambda part: self._progress(0, self._settings.n, f"surveying the server, {part}"))
        self._progress(0, self._settings.n, "trying random calls")
        self._knows_nothing = await try_random_policies(self._explorer)
        numbers = count()
        while self._without < MOST_WITHOUT and (batch := self._next_batch(numbers)):
            before = len(self.made)
            for found in await self._explore(batch):
                self._settle(found)
            self._without = 0 if len(self.made) > before else self._without + len(batch)
            self._progress(len(self.made), self._settings.n, f"{self.report.dropped.total()} chains dropped")
        if not self.made:
            reasons = "; ".join(f"{reason} ({number})" for reason, number in self.report.dropped.most_common(3))
            problem = f"no chain of {self.report.explored} makes a task: {reasons or 'no call worked'}"
            raise ConfigError(problem, remedy=NO_TASKS_REMEDY)

    @property
    def unused_tools(self) -> list[str]:
        """The tools whose results are too large."""
        return [tool for tool in self.server.specs if tool not in self._explorer.tools]

    def describe_limit(self) -> str:
        """Why there are fewer tasks than wanted; empty if there are not."""
        missing = [
            f"{left} of level {level}, {SPLITS[split]}" for (level, split), left in self._wanted.items() if left > 0
        ]
        if not missing:
            return ""
        made = f"{self.report.total} of {self._settings.n} tasks"
        if self._without < MOST_WITHOUT:
            return f"{made}: it was stopped."
        reasons = "; ".join(f"{reason} ({number})" for reason, number in self.report.dropped.most_common(2))
        return (
            f"{made}: the last {self._without} chains made no new task. Missing: {', '.join(missing)}. Most chains were"
            f" dropped because: {reasons}. {MORE_TASKS}"
        )

    def _next_batch(self, numbers: Iterator[int]) -> list[tuple[int, int, str]]:
        """Numbers, levels and splits of the next chains: those that are wanted most."""
        open_quotas = sorted(((left, key) for key, left in self._wanted.items() if left > 0), reverse=True)
        if not open_quotas:
            return []
        picks = [open_quotas[at % len(open_quotas)][1] for at in range(AT_ONCE)]
        return [(number, level, split) for number, (level, split) in zip(numbers, picks, strict=False)]

    async def _explore(self, batch: Sequence[tuple[int, int, str]]) -> list[MadeTask | Dropped]:
        async def explore(at: int) -> MadeTask | Dropped:
            try:
                chain = await self._explorer.explore(*batch[at])
                self._make_task(chain)  # What this drops is not executed again.
                return self._make_task(await self._confirm(chain))
            except Dropped as reason:
                return reason

        return await run_concurrently(len(batch), explore)

    async def _confirm(self, chain: Chain) -> Chain:
        """The chain, executed a second time, without calls that it does not need; raises Dropped."""
        await check_again(self.server, chain)
        while (shorter := await find_shorter(self.server, chain)) is not None:
            if self._wanted.get((shorter.level, shorter.split), 0) <= 0:
                raise Dropped("one of its calls can be left out")
            self._make_task(shorter)
            await check_again(self.server, shorter)
            chain = shorter
        return chain

    def _settle(self, found: MadeTask | Dropped) -> None:
        """Keeps a task, or counts why there is none; those of the same batch count too."""
        self.report.explored += 1
        try:
            if isinstance(found, Dropped):
                raise found
            self._explorer.learn_from(found.chain)
            self._check_wanted(found.chain)
        except Dropped as reason:
            self.report.dropped[str(reason)] += 1
            return
        chain = found.chain
        self.made.append(found.without_results())
        self._keys.add(chain.key)
        self._wanted[chain.level, chain.split] -= 1
        self.report.kept[chain.level, chain.split] += 1
        tools = [step.tool for step in chain.steps]
        self.report.tools.update(tools)
        self._explorer.used.update(tools)
        graded = ["state"] * bool(chain.end_state) + ["answer"] * (chain.answer is not None)
        self.report.graded[" and ".join(graded)] += 1

    def _check_wanted(self, chain: Chain) -> None:
        if chain.key in self._keys:
            raise Dropped("the same as another task")
        if self._wanted.get((chain.level, chain.split), 0) <= 0:
            raise Dropped("enough tasks of its level")

    def _make_task(self, chain: Chain) -> MadeTask:
        """The chain with its question; raises Dropped with what is wrong with it."""
        self._check_wanted(chain)
        if self._settings.answers_only and (chain.answer is None or chain.end_state):
            raise Dropped("its grade needs the server's state")
        if self._settings.answers_only and chain.answer is not None and not is_comparable(chain.answer.text):
            raise Dropped("a shell cannot compare its answer")
        if any(split_of(value) != chain.split for value in chain.values):
            raise Dropped("one of its values belongs to the other split")
        if problem := self._knows_nothing.find_problem(chain):
            raise Dropped(problem)
        draw = Random(f"{self._settings.seed}/question/{chain.key}")  # noqa: S311 - not security-relevant
        question = write_question(chain, self.server.specs, draw)
        if len(question) > MAX_QUESTION:
            raise Dropped("its question is too long")
        if chain.answer is not None and tells_answer(question, chain.answer):
            raise Dropped("its question tells the answer")
        return MadeTask(chain, question)


SPLITS = {"train": "training", "held_out": "held out"}
MORE_TASKS = (
    "More come from a `state` with more in it, `--examples` for arguments that no schema tells, other `--levels`, or"
    " fewer `--tool`."
)
NO_TASKS_REMEDY = (
    "give it a `state` with something in it, tools that read or change it, and `--examples` for arguments that no"
    " schema tells, such as SQL"
)


def _quotas(settings: MakeSettings) -> dict[tuple[int, str], int]:
    """How many tasks of each level and split are wanted."""
    held_out = round(settings.n * settings.held_out)
    quotas = {}
    for split, wanted in (("train", settings.n - held_out), ("held_out", held_out)):
        for at, level in enumerate(settings.levels):
            quotas[level, split] = wanted // len(settings.levels) + (at < wanted % len(settings.levels))
    return quotas


def is_comparable(answer: str) -> bool:
    """Whether a shell of any locale compares an answer whatever its case: it has text, and letters with a case are
    ASCII."""
    return bool(answer.strip()) and not any(ord(sign) > MAX_ASCII and sign.lower() != sign.upper() for sign in answer)


def count_shared_values(made: Sequence[MadeTask]) -> int:
    """How many values of held-out tasks training tasks have: 0 by construction, and counted."""
    values: dict[str, set[str]] = {"train": set(), "held_out": set()}
    for task in made:
        values[task.chain.split] |= task.chain.values
    return len(values["train"] & values["held_out"])
