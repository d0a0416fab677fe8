"""Plays a scheduler of a plug-in file against a policy that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from tests.trainer.conversations import template_for
from tests.trainer.scripts import HERMES, gateway_of, says
from trainer.config import PlaySettings, RolloutLimits
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.play import Player
from trainer.run.rollout import Rollout
from trainer.stage import stepper_of
from trainer.task import Task
from trainer.template import Template

ASKS = ({"role": "system", "content": "You answer."}, {"role": "user", "content": "What is 3 + 4?"})
ROW = {"messages": [dict(message) for message in ASKS], "solution": "7"}
TASK = Task("t", ASKS, "7", columns=ROW)


async def played(
    stepper: str,
    answers: Sequence[str | Answer],
    task: Task = TASK,
    limits: RolloutLimits | None = None,
    template: Template | None = None,
    **args: Any,
) -> Rollout:
    template = template or template_for(HERMES)
    said = iter([says(template, one)[0] if isinstance(one, str) else one for one in answers])

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        return next(said)

    found = stepper_of(PlaySettings(stepper=stepper, stepper_args=args))
    with anyio.fail_after(20):
        async with gateway_of() as gateway, ScriptedEngine(script) as engine:
            limits = limits or RolloutLimits(rollout_tokens=100_000)
            return await Player(engine, template, gateway, limits, stepper=found).play(task, group="g")


def trained(rollout: Rollout) -> list[str]:
    """What the policy wrote, as text, turn by turn and over all ledgers."""
    words = template_for(HERMES).words
    return [words(turn.ids) for turn in rollout.turns]


def others(rollout: Rollout) -> list[str]:
    """What it read, entry by entry."""
    decode = template_for(HERMES).tokens.decode
    return [decode(entry.ids) for entry in rollout.ledger if entry.author is not Author.POLICY and entry.ids]


def plugin(file: Path, name: str) -> str:
    return f"{file}:{name}"
