"""Training modes: staleness of every token, determinism, resuming and replay."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.train.jobs import small_job
from tests.trainer.train.trainings import string_console as string_console
from tests.trainer.train.trainings import write_tools
from trainer.data.curriculum import TaskStream
from trainer.policy.update import PolicyUpdater
from trainer.rollout.rollout import Rollout
from trainer.storage.rollout_file import Rollouts
from trainer.train.job import load_tasks
from trainer.train.replay_step import replay_step
from trainer.train.settings import TrainSettings
from trainer.train.start import train

STEPS, PROMPTS, N = 5, 3, 4
SEVENTHS = {"components": {"sevenths": {"function": f"{Path(__file__).parent}/sevenths.py:sevenths"}}}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tools(tmp_path_factory.mktemp("modes"))


def make_job(tools: str, mode: str, **more: Any) -> TrainSettings:
    defaults = {"steps": STEPS, "prompts": PROMPTS, "n": N, "reward": SEVENTHS, "evaluation": {"every": 3, "rows": 4}}
    given = {"tools": tools, "mode": mode, "demo": {"kinds": ["fact"]}, "sampling": {"temperature": 1.5}}
    return small_job(**{**given, **defaults, **more})


def read_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 0' not in line]


def token_ages(rollout: Rollout, version: int) -> list[int]:
    """Of each token that was written."""
    versions = [one for one in rollout.ledger.versions if one is not None]
    return [version - one for one in versions]


def rollouts_by_step(run: Path) -> dict[int, list[Rollout]]:
    """What each step learned from, as it names it or as its groups do."""
    steps: dict[int, list[Rollout]] = {}
    for one in Rollouts(run):
        steps.setdefault(one.step or int(one.group.split("-")[0]), []).append(one)
    return steps


@pytest.fixture(scope="module")
async def off(tools: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Path:
    run = tmp_path_factory.mktemp("off") / "run"
    await train(make_job(tools, "one_step_off"), run, string_console())
    return run


@pytest.fixture(scope="module")
async def flow(tools: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Path:
    run = tmp_path_factory.mktemp("flow") / "run"
    await train(make_job(tools, "asynchronous", max_staleness=2), run, string_console())
    return run


def test_one_step_off_rollouts_are_one_version_behind(off: Path) -> None:
    for step, rollouts in rollouts_by_step(off).items():
        assert len(rollouts) == PROMPTS * N
        assert {age for one in rollouts for age in token_ages(one, step - 1)} == {min(1, step - 1)}
    lines = read_lines(off)
    assert [line["staleness/max"] for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [line.get("staleness/age_1", 0.0) for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert lines[0]["mismatch/max"] < 1e-4 and all("staleness/kl" in line for line in lines[1:])
    assert not any("mismatch/max" in line for line in lines[1:])  # Nobody knows what the engine's part is of that.
    assert all(line["engine/waiting_s"] >= 0 and line["time/waiting_s"] >= 0 for line in lines)


def test_asynchronous_steps_respect_max_staleness_and_train_each_rollout_once(flow: Path) -> None:
    steps = rollouts_by_step(flow)
    learned = {step: rollouts for step, rollouts in steps.items() if step}
    assert sorted(learned) == [*range(1, STEPS + 1)]
    for step, rollouts in learned.items():
        assert len({one.group for one in rollouts}) == PROMPTS and len(rollouts) == PROMPTS * N
        assert all(0 <= age <= 2 for one in rollouts for age in token_ages(one, step - 1))
    lines = read_lines(flow)
    assert sum(line["staleness/dropped"] for line in lines) == len({one.group for one in steps.get(0, ())})
    for line in lines:
        counted = Counter(age for one in learned[line["step"]] for age in token_ages(one, line["step"] - 1))
        shares = {age: line.get(f"staleness/age_{age}", 0.0) for age in range(3)}
        assert shares == {age: pytest.approx(counted[age] / counted.total()) for age in range(3)}
        assert line["staleness/max"] == max(counted)


def expected_draws(settings: TrainSettings, count: int) -> Counter[str]:
    """The first tasks of the run's order."""
    course = TaskStream(settings.curriculum, load_tasks(settings).train, seed=settings.seed)
    return Counter(task.id for task in islice(course, count))


def tasks_by_group(run: Path) -> dict[str, str]:
    return {one.group: one.task for one in Rollouts(run)}


def test_asynchronous_run_draws_each_task_once_in_order(flow: Path) -> None:
    asked = tasks_by_group(flow)
    assert Counter(asked.values()) == expected_draws(make_job("", "asynchronous"), len(asked))


@pytest.mark.parametrize("mode", ["one_step_off", "asynchronous"])
async def test_resumed_run_repeats_rollouts_that_were_under_way(
    mode: str, tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, run, learn = make_job(tools, mode, max_staleness=2), tmp_path / "run", PolicyUpdater.train_step

    def fails(self: PolicyUpdater, given: Any) -> dict[str, float]:
        if self._policy.steps == 2:
            raise RuntimeError("the light went out")
        return learn(self, given)

    monkeypatch.setattr(PolicyUpdater, "train_step", fails)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="the light went out"), flatten_subgroups=True):
        await train(settings, run, string_console())
    cut_off = tasks_by_group(run)
    assert len(cut_off) > 3 * PROMPTS - 1  # What was over, and what step 3 was given, is there to be read.
    monkeypatch.undo()
    await train(settings, run, string_console(), resume=True)
    assert [line["step"] for line in read_lines(run)] == [*range(1, STEPS + 1)]
    asked = tasks_by_group(run)
    assert len(Rollouts(run)) == len({(one.group, one.index) for one in Rollouts(run)}) == len(asked) * N
    assert Counter(asked.values()) == expected_draws(settings, len(asked))
    for step, rollouts in rollouts_by_step(run).items():
        assert not step or len(rollouts) == PROMPTS * N
    for step in (2, 3, 5):
        console = string_console()
        assert await replay_step(run, step, console), console.file.getvalue()  # type: ignore[attr-defined]
