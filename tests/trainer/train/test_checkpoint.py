"""A checkpoint is whole or is not there, whatever happened while it was written."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.train.checkpoint import STATE, CheckpointError, Checkpoints
from trainer.train.evaluate import Rate


def write(folder: Path, text: str = "weights") -> None:
    (folder / "model.bin").write_text(text)
    (folder / "inner").mkdir()
    (folder / "inner" / "optimizer.bin").write_text(text * 2)


def saved(run: Path, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(run, keep)
    for step in steps:
        checkpoints.save(step, {"position": step}, write)
    return checkpoints


def test_what_was_saved_last_is_found_with_its_state(tmp_path: Path) -> None:
    found = saved(tmp_path, 1, 2).latest()
    assert found is not None and (found.step, found.state) == (2, {"position": 2})
    assert (found.folder / "inner" / "optimizer.bin").read_text() == "weightsweights"


def test_a_run_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).latest() is None


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, keep=3)
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["000002", "000003", "000004"]


@pytest.mark.parametrize(
    ("file", "spoil", "said"),
    [
        ("model.bin", lambda file: file.write_text("weighty"), "is not what was written"),
        ("inner/optimizer.bin", lambda file: file.write_text("half"), "is not what was written"),
        ("model.bin", lambda file: file.unlink(), "is missing"),
        (STATE, lambda file: file.write_text('{"step": 2, "sta'), "cannot be read"),
        (STATE, lambda file: file.unlink(), "cannot be read"),
    ],
)
def test_a_broken_one_is_told_by_its_file_and_costs_one_step(tmp_path: Path, file: str, spoil, said: str) -> None:  # type: ignore[no-untyped-def]
    checkpoints, told = saved(tmp_path, 1, 2), []
    spoil(tmp_path / "checkpoints" / "000002" / file)
    found = checkpoints.latest(told.append)
    assert found is not None and found.step == 1
    assert len(told) == 1 and Path(file).name in told[0] and said in told[0] and "the one before it" in told[0]


def test_where_none_is_whole_it_says_so_and_does_not_begin_anew(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    for step in ("000001", "000002"):
        (tmp_path / "checkpoints" / step / "model.bin").write_text("")
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is whole\n  remedy: restore"):
        checkpoints.latest()


def test_a_full_disk_leaves_the_one_before_and_says_what_to_do(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written \(No space left on device\); that of step 1"):
        checkpoints.save(2, {}, full)
    found = checkpoints.latest()
    assert found is not None and found.step == 1
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["000001"]


def test_what_a_kill_left_half_written_is_no_checkpoint_and_is_in_nobodys_way(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    beside = tmp_path / "checkpoints" / ".writing"
    beside.mkdir()
    (beside / "model.bin").write_text("hal")
    found = checkpoints.latest()
    assert found is not None and found.step == 1
    checkpoints.save(2, {}, write)
    assert not beside.exists()


def test_a_step_that_is_made_again_takes_the_place_of_what_it_left(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    checkpoints.save(2, {"position": "again"}, write)
    found = checkpoints.latest()
    assert found is not None and found.state == {"position": "again"}


def test_an_earlier_step_goes_on_from_what_was_kept_before_it(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 3, 4)
    assert checkpoints.before(3) is None
    found = checkpoints.before(9)
    assert found is not None and found.step == 4
    assert json.loads((found.folder / STATE).read_text())["step"] == 4


@given(st.integers(0, 500), st.integers(1, 500))
def test_an_interval_holds_its_rate_and_stays_between_nothing_and_all(right: int, tried: int) -> None:
    rate = Rate(min(right, tried), tried)
    low, high = rate.interval
    assert 0 <= low <= rate.value + 1e-12 and rate.value - 1e-12 <= high <= 1 and low < high


def test_an_interval_is_wilsons() -> None:
    assert Rate(0, 50).interval == pytest.approx((0.0, 0.0713), abs=1e-4)
    assert Rate(45, 50).interval == pytest.approx((0.7864, 0.9565), abs=1e-4)
