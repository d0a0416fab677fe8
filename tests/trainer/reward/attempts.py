"""Attempts to be scored, written out so that a test says what the policy said and what it was answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.types import Outcome, ToolCall
from gateway.types import Task as Asked
from tests.trainer.told import ids, policy
from trainer.ledger import Author, Entry, Ledger
from trainer.reward.attempt import Attempt
from trainer.reward.scored import ScoredGroup
from trainer.reward.scorer import Scorer
from trainer.reward.settings import ComponentSettings, RewardSettings
from trainer.run.rollout import Rollout, StopReason
from trainer.task import Task

TASK = Task("one", ({"role": "user", "content": "What is 3 + 4?"},), truth="7", columns={"level": 2})
JUDGED = replace(TASK, asked=Asked("one", feedback="judge"))


def calls(*names: str) -> Entry:
    return policy("", *(ToolCall(f"c{place}", name) for place, name in enumerate(names)))


def answered(text: str, *outcomes: Outcome, reward: float | None = None) -> Entry:
    message = {"role": "tool", "content": text}
    return Entry(Author.TOOL, ids(text), (message,), outcomes=outcomes or (Outcome.OK,), reward=reward, source="add")


def heard(text: str, score: float) -> Entry:
    return Entry(Author.FEEDBACK, ids(text), ({"role": "user", "content": text},), reward=score, source="judge")


def rollout(*entries: Entry, stop: StopReason = StopReason.DONE, index: int = 0, **more: Any) -> Rollout:
    asked = Entry(Author.TASK, ids("What is 3 + 4?"), TASK.messages)
    return Rollout("one", Ledger((asked, *entries)), stop, "0-0", index, **more)


def saying(*texts: str) -> list[Rollout]:
    """A group of rollouts of one turn each."""
    return [rollout(policy(text), index=index) for index, text in enumerate(texts)]


def attempt(*entries: Entry, task: Task = TASK, success: bool | None = None, **more: Any) -> Attempt:
    return Attempt(task, rollout(*entries, **more), success)


def settings(success: str | None = None, **components: Any) -> RewardSettings:
    made = {name: ComponentSettings.model_validate(one) for name, one in components.items()}
    return RewardSettings(components=made, success=success)


async def scored(folder: Path | None, rollouts: list[Rollout], task: Task = TASK, **components: Any) -> ScoredGroup:
    return await Scorer(settings(**components), folder).score(task, rollouts)


Write = Callable[[str], Path]
