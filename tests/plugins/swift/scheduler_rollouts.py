"""Runs a scheduler of a plug-in file with a scripted policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio

from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns, make_gateway
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.ledger import Author
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.rollout.task import Task
from trainer.setup import make_stepper
from trainer.template import Template

PROMPT = ({"role": "system", "content": "You answer."}, {"role": "user", "content": "What is 3 + 4?"})
ROW = {"messages": [dict(message) for message in PROMPT], "solution": "7"}
TASK = Task("t", PROMPT, "7", columns=ROW)


async def run_scheduler(
    stepper: str,
    answers: Sequence[str | Answer],
    task: Task = TASK,
    limits: RolloutLimits | None = None,
    template: Template | None = None,
    **args: Any,
) -> Rollout:
    template = template or make_template(HERMES)
    remaining_answers = iter([encode_turns(template, one)[0] if isinstance(one, str) else one for one in answers])

    def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
        return next(remaining_answers)

    scheduler_stepper = make_stepper(BaseRolloutSettings(stepper=stepper, stepper_args=args))
    with anyio.fail_after(60):
        async with make_gateway() as gateway, ScriptedEngine(script) as engine:
            limits = limits or RolloutLimits(rollout_tokens=100_000)
            return await RolloutRunner(engine, template, gateway, limits, stepper=scheduler_stepper).run(
                task, group="g"
            )


def policy_texts(rollout: Rollout) -> list[str]:
    """The policy's turns of all ledgers as text."""
    words = make_template(HERMES).decode_turn
    return [words(turn.ids) for turn in rollout.turns]


def other_texts(rollout: Rollout) -> list[str]:
    """The texts of entries that the policy did not write."""
    decode = make_template(HERMES).tokenizer.decode
    return [decode(entry.ids) for entry in rollout.ledger if entry.author is not Author.POLICY and entry.ids]
