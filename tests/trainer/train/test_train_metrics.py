"""Files of metrics and token credits after any kill, and reporters: what they get; none delays the training."""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from math import inf, nan
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage import token_credit
from trainer.storage.rollout_file import ROLLOUTS_FILE, RolloutWriter, RunError
from trainer.storage.run_files import MetricsWriter, dump_metrics, read_metrics
from trainer.train import reporters as reports_module
from trainer.train.reporters import Reporters, TensorBoardWriter
from trainer.train.run_folder import RunFolder


def write_metrics(folder: Path, steps: int = 4) -> Path:
    file = folder / "metrics.jsonl"
    with MetricsWriter(file) as metrics:
        for step in range(steps):
            metrics.add(step, {"reward/mean": step / 3})
    return file


@given(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False).filter(bool)), st.integers(0, 10**9))
def test_any_metric_name_and_number_can_be_written(metrics: dict[str, float], step: int) -> None:
    metrics.pop("step", None)
    line = dump_metrics(step, metrics)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == {"step": step, **metrics}


def test_resuming_from_a_step_truncates_later_metrics(tmp_path: Path) -> None:
    file = write_metrics(tmp_path)
    with MetricsWriter(file) as metrics:
        assert [one["step"] for one in metrics.truncate_after(2)] == [0, 1, 2]
        metrics.add(3, {"reward/mean": 9.0})
    assert [one["reward/mean"] for one in read_metrics(file)] == [0, 1 / 3, 2 / 3, 9.0]


def test_metrics_file_of_a_run_killed_at_any_byte_can_be_continued(tmp_path: Path) -> None:
    whole = write_metrics(tmp_path).read_bytes()
    for end in range(len(whole)):
        file = tmp_path / "killed.jsonl"
        file.write_bytes(whole[:end])
        lines = whole[:end].count(b"\n")
        assert len(read_metrics(file)) == lines
        with MetricsWriter(file) as metrics:
            assert len(metrics.truncate_after(99)) == lines
            metrics.add(99, {})
        assert [one["step"] for one in read_metrics(file)] == [*range(lines), 99]


@pytest.mark.parametrize("line", ["{", "{}", '{"step": 1, "loss": "high"}', "7"])
def test_damaged_metrics_line_is_reported_once_by_number_and_left_out(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_metrics(tmp_path, 2)
    with file.open("a") as opened:
        opened.write(f'{line}\n{{"step": 3}}\n')
    for _ in range(3):
        assert [metrics["step"] for metrics in read_metrics(file)] == [0, 1, 3]
    (warning,) = caplog.messages
    assert "metrics.jsonl: line 3 is damaged" in warning and "the metrics of its step are lost" in warning
    with MetricsWriter(file) as metrics:
        assert [one["step"] for one in metrics.truncate_after(9)] == [0, 1, 3]
        metrics.add(4, {})
    assert [json.loads(text)["step"] for text in file.read_text().splitlines()] == [0, 1, 3, 4], "it is told no more"


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_disk_full_in_mid_line_leaves_no_partial_line(tmp_path: Path) -> None:
    file = write_metrics(tmp_path)
    whole = file.read_bytes()
    with MetricsWriter(file) as metrics:
        with (
            file_size_limit(len(whole) + 10),
            pytest.raises(RunError, match=r"ulimit -f.*continue with `mtrl-train --resume"),
        ):
            metrics.add(4, {"reward/mean": 1.0})
        assert file.read_bytes() == whole
        metrics.add(4, {"reward/mean": 1.0})
    assert len(read_metrics(file)) == 5


ROLLOUT = Rollout(
    "t", Ledger((Entry(Author.TASK, (1, 2, 3)), Entry(Author.POLICY, (4, 5), logprobs=(-0.25, -1.5)))), StopReason.DONE
)


def write_run(folder: Path, *steps: int) -> None:
    """A run of which each step has a rollout, and said what it made of it."""
    with RolloutWriter(folder) as run:
        for step in steps:
            rollout = replace(ROLLOUT, group=f"{step}-0-0")
            run.add(rollout)
            run.add_credits(step, [Row(rollout.name)])


@dataclass
class Row:
    """What a step made of a rollout."""

    name: str
    advantages: tuple[float, ...] = (0.0, 0.5)
    weights: tuple[float, ...] = (0.0, 1.0)


def credit_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / token_credit.CREDITS_FILE).read_text().splitlines()]


@pytest.mark.parametrize("step", range(4))
def test_credits_of_repeated_steps_are_replaced(step: int, tmp_path: Path) -> None:
    write_run(tmp_path, 1, 2, 3)
    before = (tmp_path / ROLLOUTS_FILE).stat().st_size
    RunFolder(tmp_path).truncate(before * step // 3, step)
    assert credit_steps(tmp_path) == [1, 2, 3][:step]
    write_run(tmp_path, *range(step + 1, 4))
    assert credit_steps(tmp_path) == [1, 2, 3] and (tmp_path / ROLLOUTS_FILE).stat().st_size == before


SETTINGS = {"steps": 3, "algorithm": {"name": "grpo", "kl": {"coefficient": 0.0}}}
Fake = Callable[..., "FakePackage"]


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_reads_the_metrics(tmp_path: Path) -> None:
    reports = Reporters((), tmp_path, SETTINGS, "run")
    for step in (0, 1, 300):
        reports.log(step, {"reward/mean": step / 4, "kl/old": -1e-9, "loss": nan, "tokens/ünits": 1e300})
    reports.close()
    logged = read_back(tmp_path / "tensorboard")
    assert logged["reward/mean"] == [(0, 0.0), (1, 0.25), (300, 75.0)]
    assert logged["kl/old"] == [(step, pytest.approx(-1e-9)) for step in (0, 1, 300)]
    assert "loss" not in logged
    assert logged["tokens/ünits"][0][1] > 1e38


def test_steps_of_a_start_after_the_clock_was_set_back_replace_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now, steps, scale in ((2e9, (1, 2, 3), 1.0), (2e9 - 7200, (3, 4, 5), 2.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        writer = TensorBoardWriter(tmp_path)
        for step in steps:
            writer.log(step, {"loss": step * scale})
        writer.close()
    monkeypatch.undo()
    assert read_back(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 6.0), (4, 8.0), (5, 10.0)]


class FakePackage:
    """A package as W&B and trackio are, as far as it is called."""

    def __init__(self, *, fails: str = "", blocked: threading.Event | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fails, self.blocked = fails, blocked

    def __getattr__(self, name: str) -> Callable[..., FakePackage]:
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*args: Any, **kwargs: Any) -> FakePackage:
            if self.blocked is not None:
                self.blocked.wait(10)
            if name == self.fails:
                raise ConnectionError("the server is down")
            self.calls.append((name, args, kwargs))
            return self

        return called

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakePackage]:
    def install(name: str, **how: Any) -> FakePackage:
        fake = FakePackage(**how)
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__getattr__ = fake.__getattr__  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
        return fake

    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    return install


def report_run(folder: Path, name: str, metrics: Mapping[str, float] = {"loss": 0.5}) -> list[str]:
    """What was warned of, by one run of two steps."""
    notes: list[str] = []
    reports = Reporters((name,), folder, SETTINGS, "first", notes.append)
    reports.log(1, metrics)
    reports.log(2, metrics)
    reports.close()
    return notes


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_reporter_run_is_started_logged_and_finished(tmp_path: Path, hosted: Fake, name: str) -> None:
    fake = hosted(name)
    assert report_run(tmp_path, name, {"loss": 0.5, "kl/old": inf}) == []
    assert [call[0] for call in fake.calls] == ["init", "log", "log", "finish"]
    (_, begun), *_ = fake.named("init")
    assert begun["project"] == "mtrl" and begun["resume"] == "allow" and begun["config"] == SETTINGS
    assert begun["name"].startswith("first")
    assert fake.named("log") == [(({"loss": 0.5},), {"step": 1}), (({"loss": 0.5},), {"step": 2})]


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_resumed_run_continues_the_reporter_run(tmp_path: Path, hosted: Fake, name: str, key: str) -> None:
    fake = hosted(name)
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        report_run(folder, name)
    first, again, other = (begun[key] for _, begun in fake.named("init"))
    assert first == again != other
    assert not set(first) & set("/\\#?%:")


def test_run_at_mlflow_gets_settings_once_and_goes_on_when_it_is_resumed(tmp_path: Path, hosted: Fake) -> None:
    fake = hosted("mlflow")
    fake.info = SimpleNamespace(run_id="r1")  # type: ignore[attr-defined]
    assert report_run(tmp_path, "mlflow") == report_run(tmp_path, "mlflow") == []
    assert [begun["run_id"] for _, begun in fake.named("start_run")] == [None, "r1"]
    assert len(fake.named("log_params")) == 1
    assert fake.named("log_metrics") == [(({"loss": 0.5},), {"step": step}) for step in (1, 2, 1, 2)]


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_failing_reporter_warns_once_and_the_others_continue(tmp_path: Path, hosted: Fake, fails: str) -> None:
    hosted("wandb", fails=fails)
    notes = report_run(tmp_path, "wandb")
    why = "wandb failed (ConnectionError: the server is down)"
    assert notes == [f"{why} and gets no more metrics of this run; metrics.jsonl has everything"]
    assert read_back(tmp_path / "tensorboard")["loss"] == [(1, 0.5), (2, 0.5)]


def test_hanging_reporter_does_not_delay_the_training(
    tmp_path: Path, hosted: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports_module, "CLOSE_S", 0.05)
    monkeypatch.setattr(reports_module, "MAX_QUEUED", 5)
    released = threading.Event()
    hosted("wandb", blocked=released)
    notes: list[str] = []
    for steps in (2, 20):
        reports = Reporters(("wandb",), tmp_path, SETTINGS, "first", notes.append)
        for step in range(steps):
            reports.log(step, {"loss": 0.5})
        reports.close()
    released.set()
    assert [text.partition(" and ")[0] for text in notes if text.startswith("wandb")] == [
        "wandb has not received everything within 0.05 s",
        "wandb is 5 steps behind",
    ]
