"""Rollouts run ahead of learning as far as they may: what is learned from is known token by token, and counted once."""

from __future__ import annotations

import io
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.trainer.processes import TIMEOUT_S, started, until
from tests.trainer.train.jobs import small
from tests.trainer.train.trainings import NATIVE
from trainer.data.curriculum import Course
from trainer.engine.base import Agreement
from trainer.engine.torch import TorchEngine
from trainer.policy.learner import Learner
from trainer.run.file import Rollouts
from trainer.run.rollout import Rollout
from trainer.train.again import again
from trainer.train.dry import dry_run
from trainer.train.job import tasks_of
from trainer.train.settings import TrainSettings
from trainer.train.start import train

STEPS, PROMPTS, N = 5, 3, 4
MACHINE = ("time/", "engine/")
SEVENTHS = {"components": {"sevenths": {"function": f"{Path(__file__).parent}/sevenths.py:sevenths"}}}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("modes")
    for file, text in NATIVE.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    return str(folder / "tools")


def job(tools: str, mode: str, **more: Any) -> TrainSettings:
    told = {"steps": STEPS, "prompts": PROMPTS, "n": N, "reward": SEVENTHS, "evaluation": {"every": 3, "few": 4}}
    given = {"tools": tools, "mode": mode, "kinds": ["fact"], "sampling": {"temperature": 1.5}}
    return small(**{**given, **told, **more})


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def told_by(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 0' not in line]


def measured(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith(MACHINE)} for line in told_by(run)]


def ages(rollout: Rollout, version: int) -> list[int]:
    """Of each token that was written."""
    versions = [one for one in rollout.ledger.versions if one is not None]
    return [version - one for one in versions]


def by_step(run: Path) -> dict[int, list[Rollout]]:
    """What each step learned from, as it names it or as its groups do."""
    steps: dict[int, list[Rollout]] = {}
    for one in Rollouts(run):
        steps.setdefault(one.step or int(one.group.split("-")[0]), []).append(one)
    return steps


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def off(tools: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Path:
    run = tmp_path_factory.mktemp("off") / "run"
    await train(job(tools, "one_step_off"), run, quiet())
    return run


@pytest.fixture(scope="module")
async def flow(tools: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> Path:
    run = tmp_path_factory.mktemp("flow") / "run"
    await train(job(tools, "asynchronous", max_staleness=2), run, quiet())
    return run


def test_one_step_off_each_step_but_the_first_is_written_by_the_weights_before_its_own(off: Path) -> None:
    for step, rollouts in by_step(off).items():
        assert len(rollouts) == PROMPTS * N
        assert {age for one in rollouts for age in ages(one, step - 1)} == {min(1, step - 1)}
    lines = told_by(off)
    assert [line["staleness/max"] for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [line.get("staleness/age_1", 0.0) for line in lines] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert lines[0]["mismatch/max"] < 1e-4 and all("staleness/kl" in line for line in lines[1:])
    assert not any("mismatch/max" in line for line in lines[1:])  # Nobody knows what the engine's part is of that.
    assert all(line["engine/waiting_s"] >= 0 and line["time/waiting_s"] >= 0 for line in lines)


async def test_one_step_off_is_the_same_run_to_the_bit_whenever_it_is_made(
    off: Path, tools: str, tmp_path: Path
) -> None:
    await train(job(tools, "one_step_off"), tmp_path / "twice", quiet())
    assert measured(tmp_path / "twice") == measured(off)


def test_asynchronously_no_step_learns_from_a_token_that_is_too_old_and_nothing_is_learned_twice(flow: Path) -> None:
    steps = by_step(flow)
    learned = {step: rollouts for step, rollouts in steps.items() if step}
    assert sorted(learned) == [*range(1, STEPS + 1)]
    for step, rollouts in learned.items():
        assert len({one.group for one in rollouts}) == PROMPTS and len(rollouts) == PROMPTS * N
        assert all(0 <= age <= 2 for one in rollouts for age in ages(one, step - 1))
    lines = told_by(flow)
    assert sum(line["staleness/dropped"] for line in lines) == len({one.group for one in steps.get(0, ())})
    for line in lines:
        counted = Counter(age for one in learned[line["step"]] for age in ages(one, line["step"] - 1))
        shares = {age: line.get(f"staleness/age_{age}", 0.0) for age in range(3)}
        assert shares == {age: pytest.approx(counted[age] / counted.total()) for age in range(3)}
        assert line["staleness/max"] == max(counted)


def drawn(settings: TrainSettings, count: int) -> Counter[str]:
    """The first tasks of the run's order."""
    course = Course(settings.curriculum, tasks_of(settings).train, seed=settings.seed)
    return Counter(task.id for task in islice(course, count))


def groups(run: Path) -> dict[str, str]:
    return {one.group: one.task for one in Rollouts(run)}


def test_asynchronously_each_task_is_drawn_once_and_in_order(flow: Path) -> None:
    asked = groups(flow)
    assert Counter(asked.values()) == drawn(job("", "asynchronous"), len(asked))


@pytest.mark.parametrize("mode", ["one_step_off", "asynchronous"])
async def test_a_run_that_was_ended_goes_on_and_what_was_under_way_is_rolled_out_again(
    mode: str, tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, run, learn = job(tools, mode, max_staleness=2), tmp_path / "run", Learner.learn

    def fails(self: Learner, given: Any) -> dict[str, float]:
        if self._policy.steps == 2:
            raise RuntimeError("the light went out")
        return learn(self, given)

    monkeypatch.setattr(Learner, "learn", fails)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="the light went out"), flatten_subgroups=True):
        await train(settings, run, quiet())
    cut_off = groups(run)
    assert len(cut_off) > 3 * PROMPTS - 1  # What was over, and what step 3 was given, is there to be read.
    monkeypatch.undo()
    await train(settings, run, quiet(), resume=True)
    assert [line["step"] for line in measured(run)] == [*range(1, STEPS + 1)]
    asked = groups(run)
    assert len(Rollouts(run)) == len({(one.group, one.index) for one in Rollouts(run)}) == len(asked) * N
    assert Counter(asked.values()) == drawn(settings, len(asked))
    for step, rollouts in by_step(run).items():
        assert not step or len(rollouts) == PROMPTS * N
    for step in (2, 3, 5):
        console = quiet()
        assert await again(run, step, console), console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_that_flows_and_was_killed_counts_nothing_twice(tools: str, tmp_path: Path) -> None:
    settings, run = job(tools, "asynchronous", max_staleness=2, evaluation={"every": 0}), tmp_path / "run"
    (tmp_path / "run.yaml").write_text(settings.model_dump_json())
    command, metrics = ("-m", "trainer.cli", "--out", "run"), run / "metrics.jsonl"
    with started(tmp_path, *command, "--config", "run.yaml") as process:
        until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 1, process)
        process.kill()
    with started(tmp_path, *command, "--resume") as process:
        told, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, told
    assert [line["step"] for line in measured(run)] == [*range(1, STEPS + 1)]
    asked = groups(run)
    assert len(Rollouts(run)) == len({(one.group, one.index) for one in Rollouts(run)}) == len(asked) * N
    assert Counter(asked.values()) == drawn(settings, len(asked))


@pytest.mark.parametrize("step", [1, 4])
async def test_a_step_that_learned_from_several_versions_is_made_again(
    step: int, off: Path, flow: Path, one_thread: None
) -> None:
    for run in (off, flow):
        console = quiet()
        assert await again(run, step, console), console.file.getvalue()  # type: ignore[attr-defined]
        said = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"{PROMPTS * N} rollouts of step {step} played again, 0 of them differ" in said


async def test_what_teaches_nothing_is_replaced_in_each_mode(tools: str, tmp_path: Path) -> None:
    few = {"components": {"right": {"function": "outcome"}}}
    for mode in ("one_step_off", "asynchronous"):
        settings = job(tools, mode, steps=2, reward=few, algorithm={"name": "dapo", "dynamic": True}, draws=1)
        await train(settings, tmp_path / mode, quiet())
        assert [line["step"] for line in measured(tmp_path / mode)] == [1, 2]
        for step in (1, 2):
            console = quiet()
            assert await again(tmp_path / mode, step, console), console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off", "asynchronous"])
async def test_how_far_servers_are_from_the_trainer_is_told_of_each_step_in_each_mode(
    mode: str, tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained is written by other weights in some of them, and so tells nothing of it."""
    monkeypatch.setattr(TorchEngine, "agreement", property(lambda engine: Agreement(engine.version / 1e6, 1e-7)))
    await train(job(tools, mode, steps=2, evaluation={"every": 0}), tmp_path / "r", quiet())
    told = [(line["agreement/max"], line["agreement/mean"]) for line in told_by(tmp_path / "r")]
    assert told == [(1e-6, 1e-7), (2e-6, 1e-7)]


async def test_a_dry_run_tells_the_mode(tools: str) -> None:
    console = quiet()
    assert await dry_run(job(tools, "asynchronous", max_staleness=2), console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "asynchronous: a step learns from tokens that are at most 2 versions old" in told
    assert f"at most {3 * PROMPTS} groups are open at once" in told
