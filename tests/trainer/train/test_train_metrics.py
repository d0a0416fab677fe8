"""The metrics file: complete lines after any kill, and truncation on resuming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.storage.run_files import MetricsWriter, dump_metrics, read_metrics


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
