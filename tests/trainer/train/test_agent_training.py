"""Trainings and rollouts of an agent: resuming, replay, evaluation, and the account of every token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.engine_sglang.engine_harness import hosting
from tests.trainer.engine_sglang.model_server import ModelServer
from tests.trainer.train.jobs import demo_model
from tests.trainer.train.test_modes import make_job, read_lines
from tests.trainer.train.trainings import read_run_metrics, string_console, write_tools
from trainer.collect_rollouts import collect_rollouts
from trainer.ledger import Author
from trainer.replay_rollouts import replay_rollouts
from trainer.rollout.settings import RolloutSettings
from trainer.storage.rollout_file import Rollouts
from trainer.train.dry_run import dry_run
from trainer.train.evaluate import compare_run
from trainer.train.replay_step import replay_step
from trainer.train.settings import TrainSettings
from trainer.train.start import train

AGENT = {"function": "tests.plugins.agents.looping_agent:run"}
STEPS = 3
REWARD = {"components": {"agent": {"function": "agent"}}}


@pytest.fixture
def tools(tmp_path: Path) -> str:
    return write_tools(tmp_path)


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


async def test_agent_trains_and_each_token_is_accounted_for(tools: str, tmp_path: Path, one_thread: None) -> None:
    run = tmp_path / "run"
    await train(agent_job(tools, "one_step_off"), run, string_console())
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
    assert read_run_metrics(halved) == read_run_metrics(whole)
    check_account(halved)
    assert all("eval/greedy" in line for line in read_lines(halved))
    assert (await compare_run(halved, 3, None, string_console())).table


async def test_an_agent_with_a_served_teacher_is_checked(tools: str, tmp_path: Path, one_thread: None) -> None:
    console = string_console()
    async with hosting(ModelServer(demo_model()).app()) as url:
        job = agent_job(tools, sampling={}, algorithm={"kl": {"reference": {"url": url}}})
        assert await dry_run(job, tmp_path / "run", console), console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
async def recorded(tools: str, tmp_path: Path, one_thread: None, anyio_backend: str) -> Path:
    rows = [{"id": str(number), "prompt": [{"role": "user", "content": "What is 3 + 4 ?"}]} for number in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = RolloutSettings.model_validate(
        {
            "model": demo_model(), "data": str(tmp_path / "rows.jsonl"), "out": tmp_path / "run", "tools": tools,
            "agent": AGENT, "record": True, "n": 2, "sampling": {"temperature": 1.5},
            "limits": {"turn_tokens": 24, "rollout_tokens": 160},
        }
    )  # fmt: skip
    assert await collect_rollouts(settings, string_console()) == 4
    return tmp_path / "run"


async def test_collected_rollouts_of_an_agent_are_replayed_exactly(recorded: Path) -> None:
    assert all("agent" in rollout.rewards and rollout.earlier for rollout in Rollouts(recorded))
    console = string_console()
    assert await replay_rollouts(recorded, console), console.file.getvalue()  # type: ignore[attr-defined]


async def test_steps_of_an_asynchronous_training_with_an_agent_are_replayed_exactly(
    tools: str, tmp_path: Path, one_thread: None
) -> None:
    run = tmp_path / "run"
    await train(agent_job(tools, "asynchronous", max_staleness=2), run, string_console())
    check_account(run)
    trained = [rollout for rollout in Rollouts(run) if rollout.step]
    lines = read_lines(run)
    assert max(line["staleness/max"] for line in lines) > 0, "every rollout was made by the newest weights"
    for step in range(1, STEPS + 1):
        console = string_console()
        assert await replay_step(run, step, console), console.file.getvalue()  # type: ignore[attr-defined]
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"replayed {sum(one.step == step for one in trained)} rollouts of step {step}; 0 differ" in text


async def test_agent_that_changed_since_the_recording_is_reported(recorded: Path) -> None:
    run_info = recorded / "run.json"
    about = json.loads(run_info.read_text())
    about["settings"]["agent"]["args"] = {"opening": "Please ."}
    run_info.write_text(json.dumps(about))
    console = string_console()
    assert not await replay_rollouts(recorded, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "other ids" in text and "4 of them differ" in text
