"""Trainings in which an agent plays: all modes, resuming, replay, evaluation, and the account of every token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.engine_sglang.engine_harness import hosting
from tests.trainer.engine_sglang.model_server import ModelServer
from tests.trainer.train.jobs import demo_model
from tests.trainer.train.test_modes import (
    make_job,
    read_lines,
    read_metrics_without_times,
    string_console,
)
from tests.trainer.train.trainings import NATIVE
from trainer.ledger import Author
from trainer.storage.rollout_file import Rollouts
from trainer.train.dry_run import dry_run
from trainer.train.evaluate import compare_run
from trainer.train.replay_step import replay_step
from trainer.train.settings import TrainSettings
from trainer.train.start import train

pytestmark = pytest.mark.anyio
AGENT = {"function": "tests.plugins.agents.looping_agent:run"}
STEPS = 3
REWARD = {"components": {"agent": {"function": "agent"}}}


@pytest.fixture
def tools(tmp_path: Path) -> str:
    for file, text in NATIVE.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    return str(tmp_path / "tools")


def agent_job(tools: str, mode: str = "synchronous", **more: Any) -> TrainSettings:
    changes = {"agent": AGENT, "steps": STEPS, "prompts": 2, "n": 3, "reward": REWARD} | more
    return make_job(tools, mode, **changes)


def check_account(run: Path) -> None:
    """In each step, sampled = trained + left out; nothing was encoded again."""
    lines = read_lines(run)
    assert len(lines) == STEPS
    for line in lines:
        left_out = sum(value for name, value in line.items() if name.startswith("tokens/left_out/"))
        assert line["tokens/sampled"] == line["tokens/trained"] + left_out > 0
        assert line["agent/retokenised"] == 0 and line["agent/branches"] >= 1
    assert sum(line["tokens/trained"] for line in lines) > 0


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
async def test_agent_trains_in_every_mode_and_each_token_is_accounted_for(
    mode: str, tools: str, tmp_path: Path, one_thread: None
) -> None:
    run = tmp_path / "run"
    await train(agent_job(tools, mode), run, string_console())
    check_account(run)
    rollouts = list(Rollouts(run))
    assert all(rollout.stop == "done" or rollout.rewards for rollout in rollouts)
    copies = [
        entry for rollout in rollouts for ledger in rollout.ledgers for entry in ledger if entry.source == "branch"
    ]
    assert all(entry.author is Author.TASK for entry in copies)
    assert any(rollout.earlier for rollout in rollouts)
    console = string_console()
    assert await replay_step(run, STEPS, console), console.file.getvalue()  # type: ignore[attr-defined]


async def test_resumed_training_of_an_agent_goes_on_as_if_never_stopped(
    tools: str, tmp_path: Path, one_thread: None
) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    evaluation = {"every": 1, "rows": 2}
    await train(agent_job(tools, evaluation=evaluation), whole, string_console())
    await train(agent_job(tools, evaluation=evaluation, steps=1), halved, string_console())
    await train(agent_job(tools, evaluation=evaluation), halved, string_console(), resume=True)
    assert read_metrics_without_times(halved) == read_metrics_without_times(whole)
    check_account(halved)
    assert all("eval/greedy" in line for line in read_lines(halved))


async def test_an_agent_with_a_served_teacher_is_checked(tools: str, one_thread: None) -> None:
    console = string_console()
    async with hosting(ModelServer(demo_model()).app()) as url:
        job = agent_job(tools, sampling={}, algorithm={"kl": {"reference": {"url": url}}})
        assert await dry_run(job, console), console.file.getvalue()  # type: ignore[attr-defined]


async def test_trained_agent_is_compared_with_the_model_before(tools: str, tmp_path: Path, one_thread: None) -> None:
    run = tmp_path / "run"
    await train(agent_job(tools, steps=1, evaluation={"every": 0, "final_rows": 3}), run, string_console())
    comparison = await compare_run(run, None, None, string_console(), None)
    assert comparison.table
