"""Reporters (TensorBoard, W&B, MLflow, trackio): what they get, and that none can delay the training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from math import inf, nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainer.train import reporters as reports_module
from trainer.train.reporters import Reporters, TensorBoardWriter

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
