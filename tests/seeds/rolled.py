"""Rows become rollouts against real tools and interactions, with a policy that says what it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from gateway.gateway import Gateway
from tests.trainer.conversations import template_for
from tests.trainer.scripts import says
from tests.trainer.tokenizers_for_tests import FAMILIES
from trainer.config import RolloutLimits
from trainer.data import load
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.play import Player
from trainer.reward.scored import ScoredGroup
from trainer.reward.scorer import Scorer
from trainer.reward.settings import RewardSettings
from trainer.run.rollout import Rollout
from trainer.steps import Stepper
from trainer.task import Task
from trainer.template import Settings, Template

WAIT_S = 30.0
LIMITS = RolloutLimits(rollout_tokens=100_000)


def template(family: str = "hermes", settings: Settings | None = None) -> Template:
    return template_for(FAMILIES[family], settings)


class Players:
    """One gateway, and a policy for each rollout."""

    def __init__(self, gateway: Gateway, template: Template, limits: RolloutLimits, stepper: Stepper | None) -> None:
        self.gateway, self.template, self.limits = gateway, template, limits
        self.more: dict[str, Any] = {} if stepper is None else {"stepper": stepper}

    async def play(self, task: Task, *texts: str) -> Rollout:
        """What the policy writes, turn by turn; the last text is repeated."""
        turns = says(self.template, *texts)
        asked = 0

        def next_turn(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
            nonlocal asked
            asked += 1
            return turns[min(asked, len(turns)) - 1]

        async with ScriptedEngine(next_turn) as engine:
            player = Player(engine, self.template, self.gateway, self.limits, **self.more)
            return await player.play(task, group="g")


@asynccontextmanager
async def players(
    folder: Path | None,
    *,
    template: Template | None = None,
    limits: RolloutLimits = LIMITS,
    stepper: Stepper | None = None,
) -> AsyncIterator[Players]:
    """Of the tools and interactions that a folder, or a file, declares."""
    gateway = Gateway.load(folder, None) if folder else Gateway([])
    with anyio.fail_after(WAIT_S):
        async with gateway as opened:
            yield Players(opened, template or template_for(FAMILIES["hermes"]), limits, stepper)


def tasks(*rows: Mapping[str, Any]) -> list[Task]:
    return list(load([dict(row) for row in rows]))


def heard(rollout: Rollout) -> list[str]:
    """What interactions said, turn by turn."""
    entries = [entry for entry in rollout.ledger if entry.author is Author.FEEDBACK]
    return [str(message["content"]) for entry in entries for message in entry.messages]


def authors(rollout: Rollout) -> list[str]:
    return [entry.author.value for entry in rollout.ledger]


def trained(rollout: Rollout, template: Template) -> list[str]:
    """The texts that are learned from, run by run, over all ledgers."""
    runs: list[str] = []
    for ledger in rollout.ledgers:
        open_run: list[int] = []
        for token, mine in [*zip(ledger.ids, ledger.mask, strict=True), (0, False)]:
            if mine:
                open_run.append(token)
            elif open_run:
                runs.append(template.tokens.decode(open_run))
                open_run = []
    return runs


async def scored(settings: Mapping[str, Any], rollouts: Iterable[Rollout], task: Task, folder: Path) -> ScoredGroup:
    return await Scorer(RewardSettings.model_validate(settings), folder).score(task, list(rollouts))
