"""A whole short run: its files, its determinism, and resuming it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gateway.errors import ConfigError
from tests.trainer.train.jobs import small_job
from trainer.storage.rollout_file import Rollouts
from trainer.storage.run_files import describe_run_file, read_metrics
from trainer.storage.run_status import STATUS_FILE, RunStatus, read_status, write_status
from trainer.train.dry_run import dry_run
from trainer.train.evaluate import compare_run
from trainer.train.replay_step import replay_step
from trainer.train.run_folder import RunFolder
from trainer.train.start import train
from trainer.view.metrics import describe_metric, is_repeated
from trainer.view.progress import RolloutProgress


def string_console() -> Console:
    return Console(file=io.StringIO(), width=200)


def read_metrics_without_times(run: Path) -> list[dict[str, Any]]:
    """What the run's numbers are, less those of the machine."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if is_repeated(name)} for line in lines]


class StatusReader(io.StringIO):
    """Reads the run's status whenever a line is printed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.statuses = folder, list[RunStatus | None]()

    def write(self, text: str) -> int:
        found = read_status(self.folder)
        self.statuses.append(found[0] if found else None)
        return super().write(text)


@pytest.fixture(scope="module")
async def watched_run(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> StatusReader:
    reader = StatusReader(tmp_path_factory.mktemp("runs") / "whole")
    await train(small_job(), reader.folder, Console(file=reader, width=200))
    return reader


@pytest.fixture(scope="module")
def run(watched_run: StatusReader) -> Path:
    return watched_run.folder


def test_status_is_in_the_folder_only_while_the_run_trains(watched_run: StatusReader, run: Path) -> None:
    statuses = [status for status in watched_run.statuses if status]
    assert statuses and {status.steps for status in statuses} == {3}
    assert not (run / STATUS_FILE).exists()


def test_time_of_reward_functions_and_mix_of_kinds_are_metrics(run: Path) -> None:
    for metrics in read_metrics(run / "metrics.jsonl")[1:]:
        assert 0 <= metrics["time/rewards/outcome/mean_s"] <= metrics["time/rewards/outcome/max_s"]
        assert metrics["rollout/kind/fact"] + metrics["rollout/kind/sum"] == pytest.approx(1)


def test_every_metric_of_a_run_has_a_description(run: Path) -> None:
    names = {name for line in read_metrics(run / "metrics.jsonl") for name in line}
    assert [name for name in sorted(names) if describe_metric(name) is None] == []


async def test_run_folder_has_the_documented_files(run: Path) -> None:
    lines = read_metrics_without_times(run)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for name in ("reward/mean", "reward/outcome", "success/sampled", "loss", "entropy", "kl/old", "mismatch/max"):
        assert all(name in line for line in lines[1:]), name
    assert [("eval/greedy" in line) for line in lines] == [True, False, True, True]
    assert RunFolder(run).load_settings() == small_job()
    assert sorted(one.name for one in (run / "checkpoints").iterdir()) == ["000002", "000003"]


def test_every_file_of_a_run_is_in_the_reference(run: Path) -> None:
    files = [file.relative_to(run) for file in run.rglob("*") if file.is_file()]
    assert [str(file) for file in files if describe_run_file(file) is None] == []
    assert {"state.json", "optimizer.pt", "chance.pt", "model.safetensors"} <= {file.name for file in files}


async def test_rollouts_store_weighted_reward_and_task_kind(run: Path) -> None:
    for step in (1, 2, 3):
        learned = [one for one in Rollouts(run) if one.group.startswith(f"{step}-") and one.weighted_reward is not None]
        mean = sum(one.reward or 0.0 for one in learned) / len(learned)
        assert mean == pytest.approx(read_metrics_without_times(run)[step]["reward/mean"])
        assert {one.kind for one in learned} <= {"fact", "sum"}


async def test_same_settings_give_the_same_run(run: Path, tmp_path: Path) -> None:
    await train(small_job(), tmp_path / "twice", string_console())
    assert read_metrics_without_times(tmp_path / "twice") == read_metrics_without_times(run)


async def test_recorded_step_is_replayed_with_the_same_ids_and_loss(run: Path) -> None:
    console = string_console()
    assert await replay_step(run, 2, console), console.file.getvalue()  # type: ignore[attr-defined]
    assert "16 rollouts of step 2; 0 differ" in console.file.getvalue()  # type: ignore[attr-defined]


async def test_success_before_and_after_is_compared(run: Path) -> None:
    comparison = await compare_run(run, 8, None, string_console())
    report = json.loads(comparison.json)
    for way in ("sampled", "greedy", "sampled_before", "greedy_before"):
        assert 0 <= report[way] <= 1 and report["intervals"][way][0] <= report[way] <= report["intervals"][way][1]
    assert report["by_kind"].keys() == {"fact", "sum"} and report["held_out"] and report["tasks"] == 8


async def test_evaluation_shows_its_progress_in_the_folder_of_a_run_that_does_not_train(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[RunStatus, bool]] = []
    begin_phase = RolloutProgress.begin_phase

    def begin(progress: RolloutProgress, phase: str) -> None:
        begin_phase(progress, phase)
        begun.append((progress.status(), (run / STATUS_FILE).exists()))

    monkeypatch.setattr(RolloutProgress, "begin_phase", begin)
    await compare_run(run, 4, None, string_console())
    phases = ["sampled before", "greedy before", "sampled after", "greedy after"]
    assert [status.phase for status, _ in begun] == [f"evaluating {name}" for name in phases]
    assert [(status.ended, status.total) for status, _ in begun] == [(ended, 16) for ended in (0, 4, 8, 12)]
    assert all(is_written for _, is_written in begun) and begun[-1][0].written > begun[1][0].written > 0
    assert read_status(run) is None
    write_status(run, RunStatus(step=2, steps=3))
    await compare_run(run, 1, None, string_console())
    found = read_status(run)
    assert found is not None and found[0] == RunStatus(step=2, steps=3), "the status of a run that trains"
    (run / STATUS_FILE).unlink()


async def test_untrained_weights_are_evaluated_also_by_an_engine_that_shares_the_trainers(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logprobs: list[list[float]] = []
    for smallest in (10**9, 0):
        monkeypatch.setattr("trainer.engine.torch.choose_holding.MIN_SHARED", smallest)
        await compare_run(run, 4, None, string_console())
        for name in ("greedy_before", "greedy"):
            stored = Rollouts(run / "eval" / name)
            logprobs.append([value for one in stored for value in one.ledger.logprobs])
    (before, after), shared = logprobs[:2], logprobs[2:]
    assert shared == [pytest.approx(before, abs=1e-4), pytest.approx(after, abs=1e-4)]
    assert before != pytest.approx(after, abs=1e-4)


async def test_existing_run_folder_is_not_overwritten(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder already has a run\n.*--resume"):
        await train(small_job(), run, string_console())


async def test_missing_packages_and_files_are_reported_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"the package trackio cannot be imported.*\n.*pip install trackio"):
        await train(small_job(report=["trackio"]), tmp_path / "run", string_console())
    with pytest.raises(ConfigError, match="the package trackio cannot be imported"):
        await dry_run(small_job(report=["trackio"]), string_console())
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the folder has only adapters\n.*mtrl-train export"):
        await dry_run(small_job(model=str(tmp_path)), string_console())
    assert not (tmp_path / "run").exists()


async def test_resuming_with_other_settings_is_refused_by_name(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"update.lr was 0.001, and is now 0.01"):
        await train(small_job(update={"lr": 1e-2, "warmup": 1, "steps": 3}), run, string_console(), resume=True)
