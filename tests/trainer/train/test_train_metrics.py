"""What a step measured is a whole line, whatever ends the run; and going on forgets what came after."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf, isnan, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.run.file import RunError
from trainer.run.history import dump, history
from trainer.train.metrics import Metrics


def written(folder: Path, steps: int = 4) -> Path:
    file = folder / "metrics.jsonl"
    with Metrics(file) as metrics:
        for step in range(steps):
            metrics.add(step, {"reward/mean": step / 3})
    return file


def test_a_line_a_step_is_read_back_to_the_bit(tmp_path: Path) -> None:
    told = history(written(tmp_path / "runs" / "new"))
    assert told == [{"step": step, "reward/mean": step / 3} for step in range(4)]
    assert isinstance(told[0]["step"], int)


@given(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False).filter(bool)), st.integers(0, 10**9))
def test_any_name_and_any_number_fit_in_a_line(metrics: dict[str, float], step: int) -> None:
    metrics.pop("step", None)
    line = dump(step, metrics)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == {"step": step, **metrics}


def test_what_is_no_number_is_null_and_comes_back_as_none(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl") as metrics:
        metrics.add(1, {"loss": nan, "kl/old": inf, "entropy": 0.5})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": None, "kl/old": None, "entropy": 0.5}
    told = history(tmp_path / "m.jsonl")[0]
    assert isnan(told["loss"]) and isnan(told["kl/old"]) and told["entropy"] == 0.5


def test_going_on_from_a_step_forgets_what_followed(tmp_path: Path) -> None:
    file = written(tmp_path)
    with Metrics(file) as metrics:
        assert [one["step"] for one in metrics.cut(2)] == [0, 1, 2]
        metrics.add(3, {"reward/mean": 9.0})
    assert [one["reward/mean"] for one in history(file)] == [0, 1 / 3, 2 / 3, 9.0]


def test_a_run_that_was_killed_at_any_byte_goes_on(tmp_path: Path) -> None:
    whole = written(tmp_path).read_bytes()
    for end in range(len(whole)):
        file = tmp_path / "killed.jsonl"
        file.write_bytes(whole[:end])
        lines = whole[:end].count(b"\n")
        assert len(history(file)) == lines
        with Metrics(file) as metrics:
            assert len(metrics.cut(99)) == lines
            metrics.add(99, {})
        assert [one["step"] for one in history(file)] == [*range(lines), 99]


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"step": "x"}', '{"step": 1, "loss": "high"}', "7", "\0\0"])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    file = written(tmp_path, 2)
    with file.open("a") as opened:
        opened.write(f"{line}\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 3 is damaged(?s:.*)remedy"):
        history(file)


def test_no_file_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be read \(No such file"):
        history(tmp_path / "metrics.jsonl")


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.symlink_to("/dev/full")
    with Metrics(file) as metrics, pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written \(No space left"):
        metrics.add(1, {"loss": 0.5})


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_that_fills_up_in_mid_line_leaves_no_half_line(tmp_path: Path) -> None:
    file = written(tmp_path)
    whole = file.read_bytes()
    with Metrics(file) as metrics:
        with no_file_larger_than(len(whole) + 10), pytest.raises(RunError, match="go on with --resume"):
            metrics.add(4, {"reward/mean": 1.0})
        assert file.read_bytes() == whole
        metrics.add(4, {"reward/mean": 1.0})
    assert len(history(file)) == 5
