"""Rollouts of tiny vision models with a tool that returns images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio

from gateway.types import Image, Text, ToolCall, ToolResult
from tests.trainer.policy_scripts import make_gateway
from tests.trainer.vision.vision_models import engine_of
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import weigh_all_turns
from trainer.algorithms.train_batch import TrainBatch, build_train_batch
from trainer.engine.base import Engine, Sampling
from trainer.reward.scorer import ScoredGroup, ScoredRollout
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutLimits
from trainer.rollout.steppers import Step, Stepper, ToolsAndFeedback, Turn
from trainer.rollout.task import Task
from trainer.template import Template

LOOKS = Task("looks", ({"role": "user", "content": "What do you see?"},))
EVEN = tuple(range(0, 256, 2))
"""Ids by which a turn ends, so that a model that writes noise ends its turns."""


class Looking(ToolsAndFeedback):
    """Calls a tool in the policy's place, so many times."""

    def __init__(self, *calls: tuple[str, str]) -> None:
        self.calls = calls

    def check_finished(self, turn: Turn) -> bool | StopReason:
        return StopReason.DONE if turn.number > len(self.calls) else False

    async def step(self, turn: Turn) -> Step:
        name, arguments = self.calls[turn.number - 1]
        call = ToolCall(f"call{turn.number}", name, arguments)
        return await super().step(replace(turn, reply=replace(turn.reply, calls=(call,), problems=())))


async def play(
    folder: Path,
    shown: Sequence[Image],
    *,
    n: int = 1,
    looks: int = 2,
    template: Template | None = None,
    engine: Engine | None = None,
    stepper: Stepper | None = None,
) -> list[Rollout]:
    """Each look shows the next picture, between words."""

    async def look(number: int) -> ToolResult:
        """Shows a picture."""
        return ToolResult((Text("Here:"), shown[number % len(shown)], Text("seen.")))

    template = template or Template.load(folder)
    stepper = stepper or Looking(*(("look", f'{{"number": {number}}}') for number in range(looks)))
    sampling = Sampling(stop_ids=EVEN if isinstance(stepper, Looking) else ())
    found: list[Rollout] = []
    with anyio.fail_after(60):
        async with make_gateway(look) as gateway, engine or engine_of(folder) as opened:
            limits = RolloutLimits(rollout_tokens=4000, turn_tokens=200, assistant_turns=20)
            player = RolloutRunner(opened, template, gateway, limits, sampling, stepper)

            async def one(index: int) -> None:
                found.append(await player.run(LOOKS, group="0-0-0", index=index))

            async with anyio.create_task_group() as tasks:
                for index in range(n):
                    tasks.start_soon(one, index)
    return sorted(found, key=lambda rollout: rollout.index)


def lesson_of(rollouts: Sequence[Rollout], algorithm: AlgorithmSettings) -> TrainBatch:
    """Every second one was right."""
    scored = [
        ScoredRollout(rollout, {}, float(rollout.index % 2), (0.0,) * len(rollout.turns), bool(rollout.index % 2))
        for rollout in rollouts
    ]
    return build_train_batch([ScoredGroup(LOOKS, tuple(scored))], algorithm, weigh_all_turns)
