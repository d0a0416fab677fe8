"""Policies that know nothing: one does nothing, one makes a random call and answers with a value of its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from random import Random

from gateway.errors import ConfigError
from mtrl_plugins.task_maker.chain import Chain, Dropped
from mtrl_plugins.task_maker.explore import Explorer
from mtrl_plugins.task_maker.server_sessions import run_concurrently
from mtrl_plugins.task_maker.values import Value, leaves

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
