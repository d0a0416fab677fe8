"""Runs rollouts of rows with real tools and interactions, and a scripted policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from gateway.gateway import Gateway
from tests.trainer import conversations
from tests.trainer.policy_scripts import encode_turns
from tests.trainer.reward.attempts import CharacterDecoder
from tests.trainer.tokenizer_families import FAMILIES
from trainer.data import load_rows
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.reward.scorer import ScoredGroup, Scorer
from trainer.reward.settings import RewardSettings
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import Stepper
from trainer.rollout.task import Task
from trainer.template import Settings, Template

WAIT_S = 30.0
LIMITS = RolloutLimits(rollout_tokens=100_000)


def make_template(family: str = "hermes", settings: Settings | None = None) -> Template:
    return conversations.make_template(FAMILIES[family], settings)


class RolloutRunners:
    """Runs rollouts with one gateway and scripted turns."""

    def __init__(self, gateway: Gateway, template: Template, limits: RolloutLimits, stepper: Stepper | None) -> None:
        self.gateway, self.template, self.limits = gateway, template, limits
        self.options: dict[str, Any] = {} if stepper is None else {"stepper": stepper}

    async def play(self, task: Task, *texts: str) -> Rollout:
        """Runs a rollout whose policy turns are these texts; the last one is repeated."""
        turns = encode_turns(self.template, *texts)
        calls = 0

        def next_turn(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
            nonlocal calls
            calls += 1
            return turns[min(calls, len(turns)) - 1]

        async with ScriptedEngine(next_turn) as engine:
            runner = RolloutRunner(engine, self.template, self.gateway, self.limits, **self.options)
            return await runner.run(task, group="g")


@asynccontextmanager
async def open_runners(
    folder: Path | None,
    *,
    template: Template | None = None,
    limits: RolloutLimits = LIMITS,
    stepper: Stepper | None = None,
) -> AsyncIterator[RolloutRunners]:
    """Opens a gateway with the tools and interactions of a folder or file."""
    gateway = Gateway.load(folder, None) if folder else Gateway([])
    with anyio.fail_after(WAIT_S):
        async with gateway as running_gateway:
            yield RolloutRunners(running_gateway, template or make_template(), limits, stepper)


def load_tasks(*rows: Mapping[str, Any]) -> list[Task]:
    return list(load_rows([dict(row) for row in rows]))


def feedback_texts(rollout: Rollout) -> list[str]:
    """The texts of interactions, turn by turn."""
    entries = [entry for entry in rollout.ledger if entry.author is Author.FEEDBACK]
    return [str(message["content"]) for entry in entries for message in entry.messages]


def authors(rollout: Rollout) -> list[str]:
    return [entry.author.value for entry in rollout.ledger]


def trained_texts(rollout: Rollout, template: Template) -> list[str]:
    """The trained texts of all ledgers, one per contiguous span."""
    spans: list[str] = []
    for ledger in rollout.ledgers:
        open_span: list[int] = []
        for token, is_trained in [*zip(ledger.ids, ledger.mask, strict=True), (0, False)]:
            if is_trained:
                open_span.append(token)
            elif open_span:
                spans.append(template.tokenizer.decode(open_span))
                open_span = []
    return spans


async def score_group(
    settings: Mapping[str, Any], rollouts: Iterable[Rollout], task: Task, folder: Path
) -> ScoredGroup:
    return await Scorer(RewardSettings.model_validate(settings), folder, CharacterDecoder()).score(task, list(rollouts))
