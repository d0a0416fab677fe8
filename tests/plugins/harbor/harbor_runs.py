"""Plays rollouts of a scripted policy in Harbor tasks, as a run does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from mtrl_plugins.harbor.settings import REWARD
from tests.plugins.agents.agent_harness import TEMPLATE, Policy, check_laws, script
from tests.plugins.verifiers.verifiers_runs import EnvironmentRuns
from tests.trainer.policy_scripts import render_calls
from trainer.engine.scripted import ScriptedEngine
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.setup import load_data, make_gateway
from trainer.train.settings import TrainSettings

LIMITS = {"memory_mb": 256, "processes": 40, "disk_mb": 16, "files": 1000}


def make_settings(folder: Path, *, agent: Mapping[str, Any] | None = None, **options: Any) -> TrainSettings:
    """The settings of a run file with `environment: harbor:FOLDER`, and an agent that plays it."""
    sandbox = {**LIMITS, **options.pop("sandbox", {})}
    reward = {"function": REWARD, "batched": True, "args": {"missing": options.pop("missing", None)}}
    values = {"name": f"harbor:{folder}", "timeout_s": 30, "sandbox": sandbox, **options}
    run = {"model": "mine", "environment": values, "reward": {"components": {"environment": reward}}}
    return TrainSettings.model_validate({**run, "agent": agent} if agent else run)


@asynccontextmanager
async def open_tasks(folder: Path, **options: Any) -> AsyncIterator[EnvironmentRuns]:
    """The tasks of a folder, opened as a run does."""
    settings = make_settings(folder, **options)
    tasks = load_data(settings, settings.data)
    with anyio.fail_after(240):
        async with make_gateway(settings) as gateway:
            yield EnvironmentRuns(
                settings, tasks, gateway, settings.limits.model_copy(update={"rollout_tokens": 100_000})
            )


@dataclass
class AgentRuns(EnvironmentRuns):
    """An open environment that an agent plays."""

    runner: RolloutRunner = field(kw_only=True)
    engine: ScriptedEngine = field(kw_only=True)

    async def play(self, name: str) -> tuple[Rollout, float | None]:
        """A rollout of a task, with the laws that hold for each, and its reward if it is scored."""
        (row,) = (number for number, task in enumerate(self.tasks) if task.id == name)
        rollout = await self.runner.run(self.tasks[row], group="g")
        check_laws(rollout, self.engine)
        group = await self.score(rollout, row=row)
        return rollout, group.scored[0].reward if group.scored else None


@asynccontextmanager
async def open_agent(
    folder: Path, agent: Mapping[str, Any], policy: Policy | Sequence[str], *, limits: Any = None, **options: Any
) -> AsyncIterator[AgentRuns]:
    """The tasks of a folder with an agent, opened as a run does, and what the policy writes."""
    settings = make_settings(folder, agent=agent, **options)
    (player,) = (player for part in settings.parts if (player := part.make_player(settings)))
    engine = ScriptedEngine(script(policy))
    with anyio.fail_after(400):
        async with make_gateway(settings) as gateway, player:
            given = settings.limits.model_copy(update={"rollout_tokens": 200_000, **(limits or {})})
            runner = player.wrap(RolloutRunner(engine, TEMPLATE, gateway, given))
            tasks = load_data(settings, settings.data)
            yield AgentRuns(settings, tasks, gateway, runner=runner, engine=engine)


def write_turns(commands: Sequence[str]) -> list[str]:
    """The policy's turns: a command, and the end of its step."""
    return [turn for command in commands for turn in (render_calls(("shell", {"command": command})), "Done.")]


async def play(runs: EnvironmentRuns, name: str, commands: Sequence[str]) -> tuple[Rollout, float | None]:
    """A rollout of a task, and its reward if it is scored."""
    (row,) = (number for number, task in enumerate(runs.tasks) if task.id == name)
    rollout = await runs.run(*write_turns(commands), row=row)
    group = await runs.score(rollout, row=row)
    return rollout, group.scored[0].reward if group.scored else None
