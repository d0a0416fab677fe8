"""Explores a server: a survey learns its values and which arguments work, then chains of calls are tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import sqrt
from random import Random
from typing import Any

from trainer.task_maker.arguments import ArgumentWriter, SourceStatistics, Written
from trainer.task_maker.chain import Chain, Dropped, Step, prune, with_links, without_step
from trainer.task_maker.server_sessions import CallResult, Server, ServerSession
from trainer.task_maker.values import Value, is_usable, leaves, look_up, split_of

SURVEY_SESSIONS = 12
SURVEY_CALLS = 24
TRIES_PER_STEP = 5
MAX_KNOWN = 2000
MIN_TOOL_WEIGHT = 0.005
Examples = Mapping[str, Sequence[Mapping[str, Any]]]


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
    used: Counter[str] = field(default_factory=Counter)
    """How many tasks use a tool so far: rare ones are tried more often."""

    async def survey(self) -> None:
        """Calls every tool in several fresh sessions, with every source of arguments alike."""
        for state in self.server.states:
            self.known.setdefault(state, list(self.server.files.get(state, ())))
            for number in range(SURVEY_SESSIONS):
                draw = Random(f"{self.seed}/survey/{state}/{number}")  # noqa: S311 - not security-relevant
                with suppress(Dropped):  # What was learned before stays.
                    async with self.server.open(state) as session:
                        await self._survey_session(session, state, draw, only_reads=number % 2 == 1)

    async def _survey_session(self, session: ServerSession, state: str, draw: Random, *, only_reads: bool) -> None:
        tools = [tool for tool in self.server.specs if not (only_reads and tool in self.writers)]
        before = await session.state()
        draw.shuffle(tools)
        is_untouched = True
        seen: list[Value] = []
        for number in range(max(SURVEY_CALLS, 2 * len(tools)) if tools else 0):
            tool = tools[number % len(tools)]
            values = [*self.known[state], *seen]
            written = self._write(tool, values, draw.choice(("train", "held_out")), draw, explores=True)
            result = await session.call(tool, written.arguments)
            self.statistics.record(tool, written.sources, ok=result.ok)
            after = await session.state()
            self.writers |= {tool} if after != before else set()
            is_untouched = is_untouched and after == before and not (result.ok and not self.server.has_folder)
            before = after
            if not result.ok:
                continue
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
        return choose_goal(steps, split, state, end, draw)

    async def _walk(
        self, session: ServerSession, state: str, level: int, split: str, draw: Random
    ) -> tuple[list[Step], Mapping[str, str]]:
        tools = list(self.server.specs)
        weights = [self._tool_weight(tool) for tool in tools]
        steps: list[Step] = []
        known, stated = list(self.known[state]), set[str]()
        before = await session.state()
        for _ in range(TRIES_PER_STEP * level):
            tool = draw.choices(tools, weights)[0]
            written = self._write(tool, known, split, draw, explores=False)
            result = await session.call(tool, written.arguments)
            if not result.ok:
                continue
            after = await session.state()
            stated |= {str(literal) for literal in written.literals}
            steps.append(_make_step(tool, written, result, writes=after != before))
            known += [replace(value, step=len(steps) - 1) for value in new_values(result.value, tool, stated)]
            before = after
            if len(prune(steps, keeps_last=not steps[-1].writes)) >= level:
                return steps, after
        raise Dropped("too few of its calls worked")

    def _tool_weight(self, tool: str) -> float:
        return max(MIN_TOOL_WEIGHT, self.statistics.tool_weight(tool) ** 2) / sqrt(1 + self.used[tool])

    async def random_call(self, state: str, number: int) -> tuple[CallResult, Mapping[str, str]]:
        """A random call in a fresh state, with the state that it leaves."""
        draw = Random(f"{self.seed}/random/{state}/{number}")  # noqa: S311 - not security-relevant
        tool = draw.choice(list(self.server.specs))
        split = draw.choice(("train", "held_out"))
        written = self._write(tool, self.known[state], split, draw, explores=False)
        async with self.server.open(state) as session:
            result = await session.call(tool, written.arguments)
            return result, await session.state()


def new_values(result: Any, key: str, stated: set[str]) -> list[Value]:
    """The values in a result that the caller did not write itself."""
    return [Value(value, name or key, None, path) for name, path, value in leaves(result) if str(value) not in stated]


def _make_step(tool: str, written: Written, result: CallResult, *, writes: bool) -> Step:
    return Step(tool, written.arguments, written.links, written.literals, result.value, writes, result.text)


def choose_goal(steps: Sequence[Step], split: str, state: str, end: Mapping[str, str], draw: Random) -> Chain:
    """The chain with what to grade: a value of the last result, or the state, or both; raises Dropped."""
    writes = any(step.writes for step in steps)
    answer = None if steps[-1].writes else _choose_answer(steps, split, draw)
    pruned = prune(steps, keeps_last=answer is not None)
    if not pruned:
        raise Dropped("it changes nothing, and its result has no value to ask for")
    return Chain(pruned, split, state, answer, end if writes else {})


def _choose_answer(steps: Sequence[Step], split: str, draw: Random) -> Value | None:
    """A value of the last result that the question will not tell and that belongs to the split."""
    stated = {str(literal) for step in steps for literal in step.literals}
    candidates = [
        value
        for value in new_values(steps[-1].result, steps[-1].tool, stated)
        if split_of(value.value) == split and is_usable(value.value) and not any(value.text in one for one in stated)
    ]
    return draw.choice(candidates) if candidates else None


async def find_spare_step(server: Server, chain: Chain) -> int | None:
    """A writing step without which the chain does the same; None if all are needed. Each is left out and executed."""
    linked = {value.step for step in chain.steps for value in step.links.values()}
    for at, step in enumerate(chain.steps):
        if len(chain.steps) == 1 or at in linked or not step.writes:
            continue
        shorter = replace(chain, steps=without_step(chain.steps, at))
        try:
            results, end = await execute(server, shorter)
        except Dropped:
            continue
        answer = chain.answer
        if end == chain.end_state and (answer is None or look_up(results[-1], answer.path) == answer.value):
            return at
    return None


async def execute(server: Server, chain: Chain) -> tuple[list[Any], Mapping[str, str]]:
    """Executes a chain in a fresh state: its results and the state at the end; raises Dropped if a call fails."""
    results: list[Any] = []
    async with server.open(chain.state) as session:
        for step in chain.steps:
            arguments = with_links(step, results, look_up)
            if arguments is None:
                raise Dropped("a value that a step needs was not in the results again")
            result = await session.call(step.tool, arguments)
            if not result.ok:
                raise Dropped("a call failed when it was executed again")
            results.append(result.value)
        return results, await session.state()
