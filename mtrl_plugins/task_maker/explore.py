"""Explores a server: a survey learns its values and which arguments work, then chains of calls are tried."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from math import sqrt
from random import Random
from typing import Any

from gateway.errors import ConfigError
from mtrl_plugins.task_maker.chain import Chain, Step, prune
from mtrl_plugins.task_maker.server_sessions import (
    MAX_RESULT,
    CallResult,
    Dropped,
    Server,
    ServerSession,
    run_concurrently,
)
from mtrl_plugins.task_maker.values import (
    ArgumentWriter,
    Path,
    Scalar,
    SourceStatistics,
    Value,
    Written,
    leaves,
    split_of,
)

SURVEY_SESSIONS = 12
SURVEY_CALLS = 24
TRIES_PER_STEP = 12
MIN_CONSTANT = 3
"""How many different calls have to hold a value before it counts as constant."""
MAX_KNOWN = 2000
MAX_ITEM = 10
"""Items of a list that questions name by their number."""
MOST_LARGE = 3
"""Large results in the survey, after which a tool is not called any more."""
MIN_TOOL_WEIGHT = 0.005
Examples = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass
class Constants:
    """Values that a tool's results hold whatever its arguments, such as "done", or whatever the state: no task asks for
    them."""

    _arguments: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _seen: dict[tuple[str, Path, Scalar], set[str]] = field(default_factory=lambda: defaultdict(set))
    """The arguments with which a tool's results had a value in a place."""
    _calls: dict[str, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    """The arguments and states with which a tool was called."""
    _results: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def record(self, tool: str, arguments: Mapping[str, Any], result: Any, state: Mapping[str, str]) -> None:
        key = repr(arguments)
        self._arguments[tool].add(key)
        self._calls[tool].add((key, repr(state)))
        self._results[tool].add(repr(result))
        for _, path, value in leaves(result):
            self._seen[tool, path, value].add(key)

    def has(self, tool: str, value: Value) -> bool:
        if len(self._calls.get(tool, ())) >= MIN_CONSTANT and len(self._results[tool]) == 1:
            return True
        calls = self._arguments.get(tool, set())
        return len(calls) >= MIN_CONSTANT and self._seen.get((tool, value.path, value.value)) == calls


@dataclass
class Explorer:
    """What is known of a server after its survey."""

    server: Server
    seed: int
    examples: Examples = field(default_factory=dict)
    statistics: SourceStatistics = field(default_factory=SourceStatistics)
    known: dict[str, list[Value]] = field(default_factory=dict)
    """The values of each prepared state."""
    writers: set[str] = field(default_factory=set)
    """The tools that changed the state in the survey."""
    constants: Constants = field(default_factory=Constants)
    large: Counter[str] = field(default_factory=Counter)
    """How many results of a tool were too large in the survey."""
    used: Counter[str] = field(default_factory=Counter)
    """How many tasks use a tool so far: rare ones are tried more often."""

    @property
    def tools(self) -> list[str]:
        """The tools of chains: those whose results are not too large."""
        return [tool for tool in self.server.specs if self.large[tool] < MOST_LARGE]

    async def survey(self, report: Callable[[str], None]) -> None:
        """Calls every tool in several fresh sessions, with every source of arguments alike.

        Raises ConfigError if no tool is left.
        """
        for state in self.server.states:
            self.known.setdefault(state, list(self.server.files.get(state, ())))
            for number in range(SURVEY_SESSIONS):
                report(f"session {number + 1} of {SURVEY_SESSIONS}{f' of state {state!r}' if state else ''}")
                draw = Random(f"{self.seed}/survey/{state}/{number}")  # noqa: S311 - not security-relevant
                with suppress(Dropped):  # What was learned before stays.
                    async with self.server.open(state) as session:
                        await self._survey_session(session, state, draw, only_reads=number % 2 == 1)
        if not self.tools:
            problem = f"the results of all tools have more than {MAX_RESULT:,} characters: {', '.join(self.large)}"
            raise ConfigError(problem, remedy="give it a smaller `state`, or tools that return less")

    async def _survey_session(self, session: ServerSession, state: str, draw: Random, *, only_reads: bool) -> None:
        tools = [tool for tool in self.tools if not (only_reads and tool in self.writers)]
        before = await session.state()
        draw.shuffle(tools)
        is_untouched = True
        seen: list[Value] = []
        for number in range(max(SURVEY_CALLS, 2 * len(tools)) if tools else 0):
            tool = tools[number % len(tools)]
            if self.large[tool] >= MOST_LARGE:
                continue
            values = [*self.known[state], *seen]
            written = self._write(tool, values, draw.choice(("train", "held_out")), draw, explores=True)
            result = await session.call(tool, written.arguments)
            self.statistics.record(tool, written.sources, ok=result.ok)
            self.large[tool] += result.is_large
            after = await session.state()
            self.writers |= {tool} if after != before else set()
            is_untouched = is_untouched and after == before and not (result.ok and not self.server.has_folder)
            before = after
            if not result.ok:
                continue
            self.constants.record(tool, written.arguments, result.value, after)
            found = new_values(result.value, tool, {str(literal) for literal in written.literals})
            if is_untouched or not self.server.has_folder:
                self._learn(state, found)
            seen += [replace(value, step=0) for value in found]

    def learn_from(self, chain: Chain) -> None:
        """Keeps the values that a chain read before it changed anything."""
        stated: set[str] = set()
        for step in takewhile(lambda step: not step.writes, chain.steps if self.server.has_folder else ()):
            stated |= {str(literal) for literal in step.literals}
            self._learn(chain.state, new_values(step.result, step.tool, stated))

    def _learn(self, state: str, found: Sequence[Value]) -> None:
        known = self.known[state]
        names = {(value.value, value.key) for value in known}
        known += [value for value in found if (value.value, value.key) not in names][: MAX_KNOWN - len(known)]

    def _write(self, tool: str, known: Sequence[Value], split: str, draw: Random, *, explores: bool) -> Written:
        writer = ArgumentWriter(self.statistics, known, split, draw, explores=explores)
        return writer.write(tool, self.server.specs[tool].parameters, self.examples.get(tool, ()))

    async def explore(self, number: int, level: int, split: str) -> Chain:
        """One chain of up to `level` calls, executed in a fresh state; raises Dropped."""
        draw = Random(f"{self.seed}/chain/{number}")  # noqa: S311 - not security-relevant
        state = draw.choice(self.server.states)
        async with self.server.open(state) as session:
            steps, end = await self._walk(session, state, level, split, draw)
        return self._choose_goal(steps, split, state, end, draw)

    async def _walk(
        self, session: ServerSession, state: str, level: int, split: str, draw: Random
    ) -> tuple[list[Step], Mapping[str, str]]:
        """Calls until `level` of them are needed: what leads back to an earlier state is forgotten."""
        tools = self.tools
        weights = [self._tool_weight(tool) for tool in tools]
        steps: list[Step] = []
        known, stated = list(self.known[state]), set[str]()
        passed = [await session.state()]
        for _ in range(TRIES_PER_STEP * level):
            tool = draw.choices(tools, weights)[0]
            written = self._write(tool, known, split, draw, explores=False)
            result = await session.call(tool, written.arguments)
            if result.is_large:
                raise Dropped(f"a result has more than {MAX_RESULT:,} characters")
            if not result.ok:
                continue
            after = await session.state()
            if after != passed[-1] and after in passed:
                kept = len(passed) - 1 - passed[::-1].index(after)
                steps, passed = steps[:kept], passed[: kept + 1]
                known = [value for value in known if value.step is None or value.step < kept]
                continue
            stated |= {str(literal) for literal in written.literals}
            writes = after != passed[-1]
            steps.append(
                Step(tool, written.arguments, written.links, written.literals, result.value, writes, result.text)
            )
            known += [
                replace(value, step=len(steps) - 1)
                for value in new_values(result.value, tool, stated)
                if _is_near(value.path)
                and (value.path or value.text == result.text)  # A line break at its end is no part of the value.
            ]
            passed.append(after)
            if self._is_goal(steps, split) and len(prune(steps, keeps_last=not steps[-1].writes)) >= level:
                return steps, after
        raise Dropped("too few of its calls worked")

    def _is_goal(self, steps: Sequence[Step], split: str) -> bool:
        """Whether a chain may end here: its last call changes the state, or reads a value to ask for."""
        return steps[-1].writes or bool(self._answers(steps, split))

    def _tool_weight(self, tool: str) -> float:
        return max(MIN_TOOL_WEIGHT, self.statistics.tool_weight(tool) ** 2) / sqrt(1 + self.used[tool])

    def _choose_goal(
        self, steps: Sequence[Step], split: str, state: str, end: Mapping[str, str], draw: Random
    ) -> Chain:
        """The chain with what to grade: a value of the last result, or the state, or both; raises Dropped."""
        candidates = [] if steps[-1].writes else self._answers(steps, split)
        answer = draw.choice(candidates) if candidates else None
        pruned = prune(steps, keeps_last=answer is not None)
        if not pruned:
            raise Dropped("it changes nothing, and its result has no value to ask for")
        return Chain(pruned, split, state, answer, end if any(step.writes for step in steps) else {})

    def _answers(self, steps: Sequence[Step], split: str) -> list[Value]:
        """Values of the last result that the policy reads and the question will not tell, that depend on the call, and
        are of the split."""
        last = steps[-1]
        stated = {str(literal) for step in steps for literal in step.literals}
        return [
            value
            for value in new_values(last.result, last.tool, stated)
            if split_of(value.value) == split
            and _is_near(value.path)
            and _is_plain(value)
            and (value.text in last.text or json.dumps(value.text)[1:-1] in last.text)
            and not any(value.text in one for one in stated)
            and not self.constants.has(last.tool, value)
        ]

    async def random_call(self, state: str, number: int) -> tuple[CallResult, Mapping[str, str]]:
        """A random call in a fresh state, with the state that it leaves."""
        draw = Random(f"{self.seed}/random/{state}/{number}")  # noqa: S311 - not security-relevant
        tool = draw.choice(self.tools)
        split = draw.choice(("train", "held_out"))
        written = self._write(tool, self.known[state], split, draw, explores=False)
        async with self.server.open(state) as session:
            result = await session.call(tool, written.arguments)
            return result, await session.state()


def new_values(result: Any, key: str, stated: set[str]) -> list[Value]:
    """The values in a result that the caller did not write itself."""
    return [
        Value(value, name or ("" if " " in str(value) else key), None, path)  # A whole line is no argument.
        for name, path, value in leaves(result)
        if str(value) not in stated
    ]


def _is_near(path: Path) -> bool:
    """Whether a question may name a place: nobody likes to count to the fortieth item."""
    return all(step < MAX_ITEM for step in path if isinstance(step, int))


def _is_plain(value: Value) -> bool:
    """Whether a value is one to ask for: no aligned columns, and no message of an error."""
    is_error = any(str(step).lower().startswith("error") for step in value.path) or "error" in value.text.lower()
    return "  " not in value.text and not is_error


RANDOM_CALLS = 24
"""Random calls that are executed from each prepared state; every task is held against all of them."""


@dataclass(frozen=True, slots=True)
class RandomTry:
    """What a random call left, and the answer that was then drawn from its result."""

    end_state: Mapping[str, str]
    answer: str

    def has_answer(self, answer: Value) -> bool:
        """Whether the drawn answer is right."""
        return self.answer.casefold() == answer.text.casefold()


@dataclass(frozen=True, slots=True)
class KnowsNothing:
    """What policies that know nothing reach from each prepared state; all was executed."""

    untouched: Mapping[str, Mapping[str, str]]
    tries: Mapping[str, tuple[RandomTry, ...]]

    def find_problem(self, chain: Chain) -> str | None:
        """How such a policy solves a task, or the part of it that is graded by state; None if it does not."""
        if chain.answer is None and chain.end_state == self.untouched[chain.state]:
            return "solved by doing nothing"
        for one in self.tries[chain.state]:
            if chain.end_state and one.end_state == chain.end_state:
                is_solved = chain.answer is None or one.has_answer(chain.answer)
                return "solved by one random call" if is_solved else "one random call leaves its end state"
            if not chain.end_state and chain.answer is not None and one.has_answer(chain.answer):
                return "solved by one random call"
        return None


async def try_random_policies(explorer: Explorer) -> KnowsNothing:
    """Executes nothing, and random calls, each in a fresh state."""
    untouched, tries = {}, {}
    for state in explorer.server.states:
        try:
            async with explorer.server.open(state) as session:
                untouched[state] = await session.state()
        except Dropped as error:
            raise ConfigError(
                f"server {explorer.server.name!r}: {error}", remedy="give it a smaller `state`"
            ) from error
        tries[state] = tuple(await run_concurrently(RANDOM_CALLS, partial(_try_once, explorer, state)))
    return KnowsNothing(untouched, tries)


async def _try_once(explorer: Explorer, state: str, number: int) -> RandomTry:
    try:
        result, end = await explorer.random_call(state, number)
    except Dropped:  # It ended the server.
        return RandomTry({}, "")
    draw = Random(f"{explorer.seed}/answer/{state}/{number}")  # noqa: S311 - not security-relevant
    found = [str(value) for _, _, value in leaves(result.value)]
    return RandomTry(end, draw.choice(found) if found else "")
