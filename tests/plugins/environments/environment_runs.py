"""Plays rollouts of a scripted policy on environments of other frameworks, as a run does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from mtrl_plugins.environments.host_process import stop_hosts
from tests.plugins.verifiers.verifiers_runs import EnvironmentRuns
from tests.trainer.policy_scripts import render_calls
from trainer.rollout.rollout import Rollout
from trainer.setup import load_data, make_gateway
from trainer.train.settings import TrainSettings

HERE = Path(__file__).parent
SAMPLES, STAND_IN = HERE / "samples", HERE / "stand_in"
GYM_PYTHON = HERE.parents[2] / ".gym-peers/bin/python"
"""The Python that has Gymnasium; `make peers` makes it."""
TOKENS = {"rollout_tokens": 100_000}


def make_settings(environment: str, **options: Any) -> TrainSettings:
    """The settings of a run file with `environment: FRAMEWORK:NAME`, and options of the framework."""
    python = {"python": str(GYM_PYTHON)} if environment.startswith("gymnasium:") else {}
    values = {"name": environment, "timeout_s": 30, **python, **options}
    return TrainSettings.model_validate({"model": "mine", "environment": values})


@asynccontextmanager
async def open_run(environment: str, within_s: float = 120, **options: Any) -> AsyncIterator[EnvironmentRuns]:
    """Opens an environment as a run does, and ends its process; all of that within a time."""
    settings = make_settings(environment, **options)
    try:
        tasks = load_data(settings, settings.data)
        with anyio.fail_after(within_s):
            async with make_gateway(settings) as gateway:
                yield EnvironmentRuns(settings, tasks, gateway, settings.limits.model_copy(update=TOKENS))
    finally:
        stop_hosts()


def act(action: Any) -> str:
    """The policy's turn that takes an action."""
    return render_calls(("step", {"action": action}))


def observations(rollout: Rollout) -> list[Any]:
    """What the environment said, from the prompt on."""
    return [message["content"] for message in rollout.ledger.messages if message["role"] != "assistant"]


def rewards(rollout: Rollout) -> list[float]:
    """The reward of each step."""
    return [entry.reward for entry in rollout.ledger.entries if entry.reward is not None]
