"""Files of metrics and token credits: complete lines after any kill, and truncation on resuming."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage import token_credit
from trainer.storage.rollout_file import ROLLOUTS_FILE, RolloutWriter, RunError
from trainer.storage.run_files import MetricsWriter, dump_metrics, read_metrics
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
