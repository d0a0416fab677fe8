"""Tests what a run says that it is doing now: in its folder while it trains, and read by others."""

from __future__ import annotations

import io
import json
import os
from dataclasses import fields
from pathlib import Path
from threading import Event

import pytest
from rich.console import Console

from tests.trainer.test_training_progress import RecordedProgress
from trainer.engine.base import Generation
from trainer.storage.run_status import MAX_CHARS, STATUS_FILE, RunStatus, StatusFile, read_status, write_status
from trainer.view.progress import RolloutProgress


def test_status_is_written_while_a_run_trains_and_removed_at_its_end(tmp_path: Path) -> None:
    statuses, read = iter([RunStatus(step=1), RunStatus(step=2, phase="learning")]), Event()

    def next_status() -> RunStatus:
        status = next(statuses, None)
        if status is None:
            read.set()
            raise RuntimeError("there are no more")  # As a full disk: it does not end the run.
        return status

    with StatusFile(tmp_path, next_status, every_s=0.001):
        assert read.wait(60)
        found = read_status(tmp_path)
        assert found is not None and found[0] == RunStatus(step=2, phase="learning") and found[1] < 60
    assert list(tmp_path.iterdir()) == [] and read_status(tmp_path) is None


def test_status_of_a_killed_run_is_old(tmp_path: Path) -> None:
    write_status(tmp_path, RunStatus(step=3))
    os.utime(tmp_path / STATUS_FILE, (1e9, 1e9))
    found = read_status(tmp_path)
    assert found is not None and found[1] > 1e8


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '"text"', "null", "\xff"])
def test_damaged_status_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / STATUS_FILE).write_text(content, encoding="latin-1")
    assert read_status(tmp_path) is None


@pytest.mark.parametrize("value", [True, [1], {"a": 1}, None, "x" * 1000, float("nan"), float("inf")])
def test_values_of_other_types_are_left_out(tmp_path: Path, value: object) -> None:
    (tmp_path / STATUS_FILE).write_text(json.dumps({field.name: value for field in fields(RunStatus)} | {"more": 1}))
    found = read_status(tmp_path)
    words = value[:MAX_CHARS] if isinstance(value, str) else ""
    assert found is not None and found[0] == RunStatus(phase=words, left_of=words, slowest_tool=words)


def test_status_follows_rollouts_evaluation_and_update() -> None:
    progress = RecordedProgress(steps=10)
    progress.begin(1, 8)
    with progress.phase("rolling_out"):
        progress.clock.now += 2
        progress.run_rollouts(2)
        progress.on_state("1-0-0/t/7", "generating")
        progress.clock.now += 2
        rolling = progress.status()
    assert (rolling.step, rolling.steps, rolling.phase, rolling.phase_s) == (1, 10, "rolling out", 4)
    assert (rolling.ended, rolling.total, rolling.generating, rolling.turns, rolling.written) == (2, 8, 1, 2, 20)
    assert rolling.left_s == pytest.approx(12) and rolling.left_of == "of the rollouts" and rolling.written_per_s == 5
    assert rolling.slowest_tool == "search" and rolling.slowest_p95_s == pytest.approx(0.5, rel=0.03)
    with progress.phase("evaluating", rollouts=5) as counters:
        progress.run_rollouts(1, counters)
        evaluating = progress.status()
    assert (evaluating.phase, evaluating.ended, evaluating.total) == ("evaluating", 1, 5)
    with progress.phase("learning"):
        progress.on_pass(0, 4, 0)
        progress.clock.now += 3
        progress.on_pass(1, 4, 100)
        learning = progress.status()
    assert (learning.passes, learning.total_passes, learning.left_s, learning.left_of) == (1, 4, 9, "of the update")
    assert progress.status().phase == "" and progress.status().total_passes == 0


def test_status_and_log_lines_move_while_a_turn_is_being_written() -> None:
    progress = RolloutProgress(4, phase="collecting rollouts", console=Console(file=io.StringIO(), width=40))
    progress.read_sampled = lambda: 30
    progress.on_state("0/t/0", "generating")
    status = progress.status()
    assert (status.phase, status.generating, status.total, status.written) == ("collecting rollouts", 1, 4, 30)
    assert status.written_per_s > 0 and status.steps == 0
    assert "30 in 0 turns" in progress.format_line(over=False)
    progress.on_generation("0/t/0", Generation((1,) * 40, (0.0,) * 40, "stop"), 10)
    assert progress.status().written == 40 and progress.metrics()["tokens/written"] == 40
