"""Plays a Harbor task: each step is a chat of its own, which ends with the policy's turn without a call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import fsum
from typing import Any

from mtrl_plugins.harbor.harbor_toolset import BEGIN, END_STEP, INFO, call_task
from trainer.ledger import Message
from trainer.reward.attempt import Attempt
from trainer.rollout.rollout import StopReason
from trainer.rollout.steppers import RolloutEnd, RolloutStart, Step, ToolsAndFeedback, Turn


class HarborStepper(ToolsAndFeedback):
    """Begins a task for each rollout."""

    @asynccontextmanager
    async def begin(self, start: RolloutStart) -> AsyncIterator[tuple[Step, HarborRollout]]:
        """Asks for the first instruction. Raises Unavailable."""
        rollout = HarborRollout(start)
        yield await rollout.begin(), rollout


class HarborRollout(ToolsAndFeedback):
    """One rollout of a task."""

    def __init__(self, start: RolloutStart) -> None:
        self._start = start
        self._steps = 1
        """Steps that are left, with this one."""
        self._end: dict[str, Any] | None = None

    async def begin(self) -> Step:
        """The chat of the first step."""
        return self._ask(await call_task(self._start.session, BEGIN))

    def check_finished(self, turn: Turn) -> bool | StopReason:
        goes_on = turn.reply.calls or turn.reply.problems or self._steps > 1
        return False if goes_on else StopReason.DONE

    async def step(self, turn: Turn) -> Step:
        """Calls tools, or ends a step."""
        if turn.reply.calls or turn.reply.problems:
            return await super().step(turn)
        answer = await call_task(self._start.session, END_STEP)
        if "instruction" in answer:
            return self._ask(answer)
        self._end = answer
        return Step(stop=StopReason.STEP_DONE, source=INFO)

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        """Grades the last step, whatever ended it."""
        end = self._end or await call_task(self._start.session, END_STEP, is_last=True)
        return RolloutEnd({INFO: end})

    def _ask(self, answer: dict[str, Any]) -> Step:
        self._steps = answer["steps"]
        before = tuple(message for message in self._start.task.messages if message["role"] in ("system", "developer"))
        question: Message = {"role": "user", "content": answer["instruction"]}
        return Step(history=(*before, question), source=INFO)


def harbor_reward(
    attempts: Sequence[Attempt], metric: str = "reward", missing: float | None = None
) -> list[float | None]:
    """A reward that the tests wrote, by its name; without one named `reward`, their mean. `missing` is what a rollout
    gets whose tests wrote no valid reward; by default it is not scored, as Harbor counts no such trial."""
    return [_pick(attempt.infos.get(INFO, {}).get("rewards", {}), metric, missing) for attempt in attempts]


def _pick(rewards: dict[str, float], metric: str, missing: float | None) -> float | None:
    if not rewards:
        return missing
    mean = fsum(rewards.values()) / len(rewards)
    return float(rewards.get(metric, mean if metric == "reward" else 0.0))
