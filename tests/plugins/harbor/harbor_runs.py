"""Plays rollouts of a scripted policy in Harbor tasks, as a run does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from mtrl_plugins.harbor.settings import REWARD
from tests.plugins.verifiers.verifiers_runs import EnvironmentRuns
from tests.trainer.policy_scripts import render_calls
from trainer.rollout.rollout import Rollout
from trainer.setup import load_data, make_gateway
from trainer.train.settings import TrainSettings

LIMITS = {"memory_mb": 256, "processes": 40, "disk_mb": 16, "files": 1000}


def make_settings(folder: Path, **options: Any) -> TrainSettings:
    """The settings of a run file with `environment: harbor:FOLDER`."""
    sandbox = {**LIMITS, **options.pop("sandbox", {})}
    reward = {"function": REWARD, "batched": True, "args": {"missing": options.pop("missing", None)}}
    values = {"name": f"harbor:{folder}", "timeout_s": 30, "sandbox": sandbox, **options}
    components = {"components": {"environment": reward}}
    return TrainSettings.model_validate({"model": "mine", "environment": values, "reward": components})


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


def write_turns(commands: Sequence[str]) -> list[str]:
    """The policy's turns: a command, and the end of its step."""
    return [turn for command in commands for turn in (render_calls(("shell", {"command": command})), "Done.")]


async def play(runs: EnvironmentRuns, name: str, commands: Sequence[str]) -> tuple[Rollout, float | None]:
    """A rollout of a task, and its reward if it is scored."""
    (row,) = (number for number, task in enumerate(runs.tasks) if task.id == name)
    rollout = await runs.run(*write_turns(commands), row=row)
    group = await runs.score(rollout, row=row)
    return rollout, group.scored[0].reward if group.scored else None
