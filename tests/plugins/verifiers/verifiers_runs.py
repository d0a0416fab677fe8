"""Runs environments of `verifiers` with a scripted policy, with the stand-in of the package unless a test says else."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from gateway.session import AnyGateway
from mtrl_plugins.environments.host_process import get_host, stop_hosts
from mtrl_plugins.environments.settings import EnvironmentSettings
from tests.trainer.conversations import make_template
from tests.trainer.policy_scripts import HERMES, encode_turns
from trainer.engine.base import Sampling
from trainer.engine.scripted import Answer, ScriptedEngine
from trainer.parse.choose import load_parser
from trainer.reward.scorer import ScoredGroup, Scorer
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import BaseRolloutSettings, RolloutLimits
from trainer.rollout.task import Task
from trainer.setup import load_data, make_gateway, make_stepper
from trainer.train.settings import TrainSettings

HERE = Path(__file__).parent
STAND_IN, SAMPLES = HERE / "stand_in", HERE / "samples"


def add_to_path(*folders: Path) -> str:
    """The value of PYTHONPATH that makes the folders importable."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def make_settings(environment: str, **options: Any) -> TrainSettings:
    """The settings of a run file that names the environment and nothing else."""
    given = {"name": f"verifiers:{environment}", "python": sys.executable, "timeout_s": 30, **options}
    return TrainSettings.model_validate({"model": "mine", "environment": given})


@dataclass
class EnvironmentRuns:
    """An open environment, with what a run makes of its settings."""

    settings: BaseRolloutSettings
    tasks: Sequence[Task]
    gateway: AnyGateway
    limits: RolloutLimits = field(default_factory=lambda: RolloutLimits(rollout_tokens=100_000))

    @property
    def pid(self) -> int | None:
        """The process of the environment."""
        environment = EnvironmentSettings.of(self.settings)
        assert environment is not None
        return get_host(environment).pid

    async def run(self, *turns: str | Answer, row: int = 0, index: int = 0, **options: Any) -> Rollout:
        """One rollout in which the policy writes these turns."""
        template = make_template(HERMES, parser=load_parser("hermes"))
        answers = iter([encode_turns(template, turn)[0] if isinstance(turn, str) else turn for turn in turns])

        def script(ids: Sequence[int], sampling: Sampling, key: str) -> Answer:
            return next(answers)

        limits = options.get("limits", self.limits)
        async with ScriptedEngine(script) as engine:
            runner = RolloutRunner(engine, template, self.gateway, limits, stepper=make_stepper(self.settings))
            return await runner.run(self.tasks[row], group="g", index=index)

    async def score(self, *rollouts: Rollout, row: int = 0) -> ScoredGroup:
        """Scores a group as the settings say."""
        assert isinstance(self.settings, TrainSettings)
        return await Scorer(self.settings.reward).score(self.tasks[row], rollouts)


@asynccontextmanager
async def open_environment(environment: str, within_s: float = 120, **options: Any) -> AsyncIterator[EnvironmentRuns]:
    """Opens an environment as a run does, and ends its process; all of that within a time."""
    settings = make_settings(environment, **options)
    try:
        tasks = load_data(settings, settings.data)
        with anyio.fail_after(within_s):
            async with make_gateway(settings) as gateway:
                yield EnvironmentRuns(settings, tasks, gateway)
    finally:
        stop_hosts()


def texts_of(rollout: Rollout) -> list[tuple[str, str]]:
    """The chat's roles and texts."""
    return [(message["role"], str(message.get("content") or "")) for message in rollout.ledger.messages]
