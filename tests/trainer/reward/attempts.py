"""Attempts for reward tests, built from the turns of the policy and the answers of tools and feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.types import Outcome, ToolCall
from gateway.types import Task as SessionTask
from tests.trainer.sample_rollouts import decode, policy, text_to_ids
from trainer.ledger import Author, Entry, Ledger
from trainer.reward.attempt import Attempt
from trainer.reward.scorer import ScoredGroup, Scorer
from trainer.reward.settings import ComponentSettings, RewardSettings
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.task import Task

TASK = Task("one", ({"role": "user", "content": "What is 3 + 4?"},), truth="7", columns={"level": 2})
FEEDBACK_TASK = replace(TASK, session_task=SessionTask("one", feedback="judge"))


class CharacterDecoder:
    """Decodes ids that are characters; none is special, and turns have no end token."""

    prefill = ""

    def decode_turn(self, ids: Sequence[int]) -> str:
        return decode(ids)

    decode_without_special = decode_turn


def call_turn(*names: str) -> Entry:
    return policy("", *(ToolCall(f"c{index}", name) for index, name in enumerate(names)))


def tool_entry(text: str, *outcomes: Outcome, reward: float | None = None) -> Entry:
    message = {"role": "tool", "content": text}
    return Entry(
        Author.TOOL, text_to_ids(text), (message,), outcomes=outcomes or (Outcome.OK,), reward=reward, source="add"
    )


def feedback_entry(text: str, score: float) -> Entry:
    return Entry(Author.FEEDBACK, text_to_ids(text), ({"role": "user", "content": text},), reward=score, source="judge")


def make_rollout(*entries: Entry, stop: StopReason = StopReason.DONE, index: int = 0, **more: Any) -> Rollout:
    prompt = Entry(Author.TASK, text_to_ids("What is 3 + 4?"), TASK.messages)
    return Rollout("one", Ledger((prompt, *entries)), stop, "0-0", index, **more)


def answer_group(*texts: str) -> list[Rollout]:
    """A group of rollouts with one turn each."""
    return [make_rollout(policy(text), index=index) for index, text in enumerate(texts)]


def make_attempt(*entries: Entry, task: Task = TASK, success: bool | None = None, **more: Any) -> Attempt:
    return Attempt(task, make_rollout(*entries, **more), success, CharacterDecoder())


def reward_settings(success: str | None = None, **components: Any) -> RewardSettings:
    validated = {name: ComponentSettings.model_validate(component) for name, component in components.items()}
    return RewardSettings(components=validated, success=success)


async def score_group(
    folder: Path | None, rollouts: list[Rollout], task: Task = TASK, **components: Any
) -> ScoredGroup:
    return await Scorer(reward_settings(**components), folder, CharacterDecoder()).score(task, rollouts)
