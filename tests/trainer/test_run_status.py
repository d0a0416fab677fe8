"""Tests what a run says that it is doing now: in its folder while it trains, and read by others."""

from __future__ import annotations

import io
from pathlib import Path
from threading import Event

import pytest
from rich.console import Console

from trainer.engine.base import Generation
from trainer.storage.run_status import STATUS_FILE, RunStatus, StatusFile, read_status
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


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, "\xff"])
def test_damaged_status_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / STATUS_FILE).write_text(content, encoding="latin-1")
    assert read_status(tmp_path) is None


def test_field_of_another_type_has_its_default_and_texts_are_cut(tmp_path: Path) -> None:
    (tmp_path / STATUS_FILE).write_text(f'{{"step": "3", "phase": "{"x" * 300}", "phase_s": NaN, "total": 4}}')
    found = read_status(tmp_path)
    assert found is not None and found[0] == RunStatus(phase="x" * 200, total=4)


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
