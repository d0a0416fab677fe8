"""What fails in an environment is a failure of infrastructure; processes end with the run, however it ends."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import psutil
import pytest
from typer.testing import CliRunner

from mtrl_plugins.environments.host_process import MAX_STARTS, get_host, stop_hosts
from mtrl_plugins.environments.settings import EnvironmentSettings
from tests.conftest import Write
from tests.plugins.environments.environment_runs import GYM_PYTHON, act, observations, open_run
from tests.waiting import wait_until
from trainer.cli import app
from trainer.rollout.rollout import StopReason


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("raise", "step: ValueError: the physics exploded"),
        ("die", "ended (exit code 3)"),
        ("nan", "gave the reward nan, which is not a number"),
        ("raise in reset", "open: OSError: no such world"),
        ("far too huge", "an answer of 65 MB is too long"),
    ],
)
async def test_environment_that_breaks_costs_the_rollout_and_is_never_scored(trouble: str, reason: str) -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": trouble}) as runs:
        rollout = await runs.run(act(2), act(2))
        group = await runs.score(rollout)
    assert rollout.stop is StopReason.TOOL_FAILED and reason in rollout.reason
    assert not group.scored and not rollout.rewards


async def test_environment_that_breaks_on_a_written_action_is_never_scored_either() -> None:
    options = {"args": {"trouble": "raise", "space": "box"}, "actions": "text"}
    async with open_run("gymnasium:sample_gym:Echo-v0", **options) as runs:
        rollout = await runs.run("[0.5, 0.5]", "[0.5, 0.5]")
    assert rollout.stop is StopReason.TOOL_FAILED and "the physics exploded" in rollout.reason
    assert not rollout.rewards


async def test_what_an_environment_prints_does_not_reach_the_wire() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "print"}) as runs:
        rollout = await runs.run(act(2), act(3), act(4))
        log = get_host(EnvironmentSettings.of(runs.settings)).start().describe_log()
    assert rollout.infos["environment"]["return"] == 1.5
    assert "noise" in log and "not a line of JSON" in log


async def test_huge_observation_is_cut_and_says_how_much_is_left_out() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "huge"}) as runs:
        limits = runs.limits.model_copy(update={"rollout_tokens": 2**22})
        rollout = await runs.run(act(2), "I stop.", limits=limits)
    assert "x\n(and 7 more characters)\nreward: 0" in observations(rollout)[1]


async def test_reset_that_never_answers_is_given_up() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "hang in reset"}, timeout_s=3) as runs:
        rollout = await runs.run("I stop.")
    assert rollout.stop is StopReason.TOOL_FAILED and "did not answer 'open' within 3 s" in rollout.reason


async def test_step_that_hangs_is_given_up_and_later_rollouts_get_another_process() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "hang"}, timeout_s=3) as runs:
        before = runs.pid
        rollout = await runs.run(act(2))
        assert "did not answer 'step' within 3 s" in rollout.reason and "environment.timeout_s" in rollout.reason
        await wait_until(lambda: not psutil.pid_exists(before))
        resting = await runs.run("I stop.")
        assert resting.stop is StopReason.DONE and runs.pid != before


async def test_process_that_was_stopped_on_purpose_has_not_failed() -> None:
    async with open_run("gymnasium:sample_gym:Echo-v0") as runs:
        host = get_host(EnvironmentSettings.of(runs.settings))
        for _ in range(MAX_STARTS + 1):
            await host.stop_async()
            await anyio.to_thread.run_sync(host.start)


RUN = """
model: {model}
environment: {{name: "gymnasium:FrozenLake-v1", python: ./python, n_tasks: 2, max_steps: 3}}
limits: {{turn_tokens: 8, rollout_tokens: 2000}}
"""


def test_tape_is_replayed_with_nothing_installed(model: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    python_here = Path("python")
    python_here.write_text(f'#!/bin/sh\nexec {GYM_PYTHON} "$@"\n')
    python_here.chmod(0o755)
    write("run.yaml", RUN.format(model=model))
    command = ["rollout", "--config", "run.yaml", "--out", "runs/x", "--n", "2", "--record", "--engine", "torch"]
    recorded = CliRunner().invoke(app, command)
    assert recorded.exit_code == 0, recorded.output
    stop_hosts()
    python_here.unlink()
    monkeypatch.delenv("PYTHONPATH")
    replayed = CliRunner().invoke(app, ["replay", "runs/x"])
    assert replayed.exit_code == 0, replayed.output
    assert "4 rollouts replayed, 0 of them differ" in replayed.output
