"""Others are told what a step measured, and none of them can hold the training up."""

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

from gateway.errors import ConfigError
from trainer.train import reports as reports_module
from trainer.train.events import Events
from trainer.train.reports import Reports

SETTINGS = {"steps": 3, "algorithm": {"name": "grpo", "kl": {"coefficient": 0.0}}}
Fake = Callable[..., "Hosted"]


def read_back(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By TensorBoard itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    reports = Reports((), tmp_path, SETTINGS, "run")
    for step in (0, 1, 300):
        reports.log(step, {"reward/mean": step / 4, "kl/old": -1e-9, "loss": nan, "tokens/ünits": 1e300})
    reports.close()
    told = read_back(tmp_path / "tensorboard")
    assert told["reward/mean"] == [(0, 0.0), (1, 0.25), (300, 75.0)]
    assert told["kl/old"] == [(step, pytest.approx(-1e-9)) for step in (0, 1, 300)]
    assert "loss" not in told
    assert told["tokens/ünits"][0][1] > 1e38


def test_tensorboard_forgets_the_steps_that_a_later_start_made_again(tmp_path: Path) -> None:
    for steps, value in ((range(1, 6), 1.0), (range(4, 8), 2.0)):
        events = Events(tmp_path)
        for step in steps:
            events.log(step, {"loss": value})
        events.close()
    assert read_back(tmp_path)["loss"] == [(step, 1.0 if step < 4 else 2.0) for step in range(1, 8)]


class Hosted:
    """A package as W&B, trackio and MLflow are, as far as it is called."""

    def __init__(self, *, fails: str = "", blocked: threading.Event | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.fails, self.blocked = fails, blocked
        self.info = self
        self.run_id = "of-the-server"

    def __getattr__(self, name: str) -> Callable[..., Hosted]:
        if name.startswith("__"):
            raise AttributeError(name)

        def called(*args: Any, **kwargs: Any) -> Hosted:
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
def hosted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hosted]:
    def install(name: str, **how: Any) -> Hosted:
        fake = Hosted(**how)
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__getattr__ = fake.__getattr__  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, name, module)
        return fake

    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.delenv(name, raising=False)
    return install


def told(folder: Path, name: str, metrics: Mapping[str, float] = {"loss": 0.5}) -> list[str]:
    """What was warned of, by one run of two steps."""
    said: list[str] = []
    reports = Reports((name,), folder, SETTINGS, "first", said.append)
    reports.log(1, metrics)
    reports.log(2, metrics)
    reports.close()
    return said


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_there_is_begun_told_and_finished(tmp_path: Path, hosted: Fake, name: str) -> None:
    fake = hosted(name)
    assert told(tmp_path, name, {"loss": 0.5, "kl/old": inf}) == []
    assert [call[0] for call in fake.calls] == ["init", "log", "log", "finish"]
    (_, begun), *_ = fake.named("init")
    assert begun["project"] == "mtrl" and begun["resume"] == "allow" and begun["config"] == SETTINGS
    assert begun["name"].startswith("first")
    assert fake.named("log") == [(({"loss": 0.5},), {"step": 1}), (({"loss": 0.5},), {"step": 2})]


@pytest.mark.parametrize(("name", "key"), [("wandb", "id"), ("trackio", "name")])
def test_a_run_that_goes_on_is_the_same_run_there(tmp_path: Path, hosted: Fake, name: str, key: str) -> None:
    fake = hosted(name)
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        told(folder, name)
    first, again, other = (begun[key] for _, begun in fake.named("init"))
    assert first == again != other
    assert not set(first) & set("/\\#?%:")


def test_mlflow_is_told_parameters_once_and_metrics_each_step(tmp_path: Path, hosted: Fake) -> None:
    fake = hosted("mlflow")
    assert told(tmp_path, "mlflow") == told(tmp_path, "mlflow") == []
    once = ["set_experiment", "start_run", "log_params", "log_metrics", "log_metrics", "end_run"]
    assert [call[0] for call in fake.calls] == once + [name for name in once if name != "log_params"]
    assert [begun for _, begun in fake.named("start_run")] == [
        {"run_id": None, "run_name": "first"},
        {"run_id": "of-the-server", "run_name": "first"},
    ]
    assert fake.named("log_params") == [
        (({"steps": 3, "algorithm.name": "grpo", "algorithm.kl.coefficient": 0.0},), {})
    ]
    assert fake.named("log_metrics")[0] == (({"loss": 0.5},), {"step": 1})


def test_the_environment_may_name_the_place(tmp_path: Path, hosted: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    wandb, mlflow = hosted("wandb"), hosted("mlflow")
    told(tmp_path, "wandb")
    told(tmp_path, "mlflow")
    assert wandb.named("init")[0][1]["project"] == "mine"
    assert mlflow.named("set_experiment") == []


def test_a_package_that_is_not_there_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="report: trackio is asked for") as raised:
        Reports(("trackio",), tmp_path, {}, "run")
    assert "pip install trackio" in str(raised.value)
    assert not any(thread.name.startswith("report to") for thread in threading.enumerate())


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_one_that_fails_is_warned_of_once_and_the_others_are_told(tmp_path: Path, hosted: Fake, fails: str) -> None:
    hosted("wandb", fails=fails)
    said = told(tmp_path, "wandb")
    why = "wandb failed (ConnectionError: the server is down)"
    assert said == [f"{why} and is told no more of this run; metrics.jsonl has everything"]
    assert read_back(tmp_path / "tensorboard")["loss"] == [(1, 0.5), (2, 0.5)]


def test_a_full_disk_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("no folder")
    said: list[str] = []
    reports = Reports((), tmp_path, SETTINGS, "first", said.append)
    reports.log(1, {"loss": 0.5})
    reports.close()
    assert len(said) == 1 and said[0].startswith("tensorboard failed (FileExistsError")


def test_one_that_hangs_holds_nothing_up(tmp_path: Path, hosted: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports_module, "LEAVE_S", 0.05)
    monkeypatch.setattr(reports_module, "BEHIND", 5)
    released = threading.Event()
    hosted("wandb", blocked=released)
    said: list[str] = []
    for steps in (2, 20):
        reports = Reports(("wandb",), tmp_path, SETTINGS, "first", said.append)
        for step in range(steps):
            reports.log(step, {"loss": 0.5})
        reports.close()
    released.set()
    assert [text.partition(" and ")[0] for text in said if text.startswith("wandb")] == [
        "wandb has not heard everything within 0.05 s",
        "wandb is 5 steps behind",
    ]
