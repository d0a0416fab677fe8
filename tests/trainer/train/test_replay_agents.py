"""`mtrl-train rollout` and `mtrl-train replay` with an agent: it plays again, and is given the recorded turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.train.jobs import demo_model
from tests.trainer.train.test_agent_training import AGENT, STEPS, agent_job, check_account, tools
from tests.trainer.train.test_modes import read_lines, string_console
from trainer.collect_rollouts import collect_rollouts
from trainer.replay_rollouts import replay_rollouts
from trainer.rollout.settings import RolloutSettings
from trainer.storage.rollout_file import Rollouts
from trainer.train.replay_step import replay_step
from trainer.train.start import train

pytestmark = pytest.mark.anyio
__all__ = ["tools"]


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
