"""A training is killed at any moment and goes on: what it measures from there is what it would have measured."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainer.processes import TIMEOUT_S, started, until
from tests.trainer.train.jobs import ROOT, small

STEPS = 4
LEAVE_S = 30.0
MACHINE = ("time/", "engine/")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("killed")
    settings = small(steps=STEPS, kinds=("fact",), update={"lr": 1e-3, "warmup": 1, "steps": STEPS})
    (place / "run.yaml").write_text(settings.model_dump_json())
    return place


def training(
    place: Path, out: str, *words: str, config: str = "run.yaml"
) -> AbstractContextManager[subprocess.Popen[str]]:
    chosen = () if "--resume" in words else ("--config", config)
    return started(place, "-m", "trainer.cli", *chosen, "--out", out, *words)


def finished(place: Path, out: str, *words: str) -> str:
    with training(place, out, *words) as process:
        told, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, told
    return told


def measured(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MACHINE)} for line in lines]


def lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module")
def whole(place: Path) -> list[dict[str, Any]]:
    finished(place, "whole")
    return measured(place / "whole")


@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_was_killed_at_random_moments_measures_what_an_uninterrupted_one_does(
    place: Path, whole: list[dict[str, Any]], seed: int
) -> None:
    draw, out = random.Random(seed), f"killed-{seed}"
    words: tuple[str, ...] = ()
    for after in sorted(draw.sample(range(STEPS), 2)):
        with training(place, out, *words) as process:
            children = psutil.Process(process.pid)
            until(lambda: lines(place / out) > after, process)  # noqa: B023 - called at once
            time.sleep(draw.random() * 0.3)  # anywhere within a step: this moment is what is tested
            kept = children.children(recursive=True)
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)
            until_gone(kept)
        words = ("--resume",)
    finished(place, out, "--resume")
    assert measured(place / out) == whole


def until_gone(children: list[psutil.Process]) -> None:
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_ctrl_c_leaves_in_time_with_everything_closed_and_the_run_goes_on(
    place: Path, whole: list[dict[str, Any]]
) -> None:
    with training(place, "stopped") as process:
        children = psutil.Process(process.pid)
        until(lambda: lines(place / "stopped") > 1, process)
        kept = children.children(recursive=True)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130 and time.monotonic() - began < LEAVE_S, told
        assert "--resume" in told
        until_gone(kept)
    finished(place, "stopped", "--resume")
    assert measured(place / "stopped") == whole


def test_ctrl_c_while_a_model_is_made_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    with training(tmp_path, "stopped", "--tools", str(ROOT / "tool_configs"), config="default") as process:
        until(lambda: any(kept.glob("mtrl/*/model/config.json")), process)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 130 and time.monotonic() - began < LEAVE_S, told
    assert "mtrl-train: stopped; nothing had begun" in told
    assert [*kept.glob("mtrl/*")] == [] and not (tmp_path / "stopped").exists()
