"""Checkpoints: complete or absent, whatever happens while they are written; the best by its evaluation is kept."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from threading import Event

import pytest

from trainer.train.checkpoint import (
    BEST_FILE,
    STATE_FILE,
    BestCheckpoint,
    CheckpointError,
    Checkpoints,
    measured_value,
    unfinished_name,
)
from trainer.train.evaluate import SuccessRate


def write_files(folder: Path, text: str = "weights") -> None:
    (folder / "model.bin").write_text(text)
    (folder / "inner").mkdir()
    (folder / "inner" / "optimizer.bin").write_text(text * 2)


def save_steps(run: Path, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(run, keep)
    for step in steps:
        checkpoints.save(step, {"position": step}, write_files)
    return checkpoints


@pytest.mark.parametrize(
    ("file", "spoil", "problem"),
    [
        ("model.bin", lambda file: file.write_text("weighty"), "has changed since it was written"),
        ("inner/optimizer.bin", lambda file: file.write_text("half"), "has changed since it was written"),
        ("model.bin", lambda file: file.unlink(), "is missing"),
        (STATE_FILE, lambda file: file.write_text('{"step": 2, "sta'), "cannot be read"),
        (STATE_FILE, lambda file: file.unlink(), "cannot be read"),
    ],
)
def test_damaged_checkpoint_is_reported_and_the_previous_one_used(
    tmp_path: Path, file: str, spoil, problem: str
) -> None:  # type: ignore[no-untyped-def]
    checkpoints, notes = save_steps(tmp_path, 1, 2), []
    spoil(tmp_path / "checkpoints" / "000002" / file)
    found = checkpoints.find_latest(notes.append)
    assert found is not None and found.step == 1
    assert (
        len(notes) == 1
        and Path(file).name in notes[0]
        and problem in notes[0]
        and "using the previous checkpoint" in notes[0]
    )


def test_run_does_not_restart_when_no_checkpoint_is_intact(tmp_path: Path) -> None:
    checkpoints = save_steps(tmp_path, 1, 2)
    for step in ("000001", "000002"):
        (tmp_path / "checkpoints" / step / "model.bin").write_text("")
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is intact\n  remedy: restore"):
        checkpoints.find_latest()


def test_full_disk_keeps_the_previous_checkpoint_and_gives_a_remedy(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        write_files(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = save_steps(tmp_path, 1)
    (tmp_path / "checkpoints" / unfinished_name(2)).mkdir()  # As a process that was killed leaves it.
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written \(No space left on device\); that of step 1"):
        checkpoints.save(2, {}, full)
    found = checkpoints.find_latest()
    assert found is not None and found.step == 1
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["000001"]


def test_no_checkpoint_is_written_under_a_name_that_another_had(tmp_path: Path) -> None:
    """Another machine may for a while take an old name on NFS for the finished checkpoint it has become."""
    folders: list[Path] = []

    def write(folder: Path) -> None:
        write_files(folder)
        folders.append(folder)
        if len(folders) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {}, write)
    with pytest.raises(CheckpointError):
        checkpoints.save(2, {}, write)
    checkpoints.save(2, {}, write)
    Checkpoints(tmp_path).save(2, {}, write)
    assert len(set(folders)) == 4 and {folder.parent for folder in folders} == {tmp_path / "checkpoints"}
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["000001", "000002"]


def test_every_file_and_folder_is_on_the_disk_before_a_checkpoint_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(path: Path) -> None:
        assert path.exists()
        synced.append(path.relative_to(tmp_path / "checkpoints").as_posix().partition("/")[2])

    monkeypatch.setattr("trainer.train.checkpoint.sync_path", sync)
    save_steps(tmp_path, 1)
    final = tmp_path / "checkpoints" / "000001"
    written = {path.relative_to(final).as_posix() for path in final.rglob("*")}
    assert "inner" in written and written <= {*synced}
    assert synced[-2:] == ["", ""]  # The folder of the checkpoint, and after it has its name, that above.


def test_resume_from_an_earlier_step_uses_the_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints = save_steps(tmp_path, 3, 4)
    assert checkpoints.find_before(3) is None
    found = checkpoints.find_before(9)
    assert found is not None and found.step == 4
    assert json.loads((found.folder / STATE_FILE).read_text())["step"] == 4


def test_confidence_interval_is_wilsons() -> None:
    assert SuccessRate(0, 50).interval == pytest.approx((0.0, 0.0713), abs=1e-4)
    assert SuccessRate(45, 50).interval == pytest.approx((0.7864, 0.9565), abs=1e-4)


def test_checkpoint_that_is_still_being_written_is_none_until_all_of_it_is_there(tmp_path: Path) -> None:
    may_end = Event()

    def begin(folder: Path) -> Callable[[], Mapping[str, str]]:
        def finish() -> Mapping[str, str]:
            assert may_end.wait(30)
            (folder / "late.bin").write_text("late")
            return {"late.bin": sha256(b"late").hexdigest()}

        return finish

    checkpoints = save_steps(tmp_path, 1)
    checkpoints.save(2, {}, begin)
    found = Checkpoints(tmp_path).find_latest()
    assert found is not None and found.step == 1
    checkpoints.raise_failure()
    may_end.set()
    checkpoints.save(3, {}, write_files)  # Waits for the one before.
    assert [folder.name for folder in sorted((tmp_path / "checkpoints").iterdir())] == ["000002", "000003"]
    (tmp_path / "checkpoints" / "000003" / STATE_FILE).unlink()
    found = checkpoints.find_latest()
    assert found is not None and found.step == 2


@pytest.mark.parametrize("name", ["late.bin", "lost.bin"])
def test_failure_in_the_background_is_raised_once_and_leaves_the_previous_checkpoint(tmp_path: Path, name: str) -> None:
    def begin(folder: Path) -> Callable[[], Mapping[str, str]]:
        def finish() -> Mapping[str, str]:
            if name == "late.bin":
                raise OSError(errno.ENOSPC, "No space left on device")
            return {name: "00"}

        return finish

    checkpoints = save_steps(tmp_path, 1)
    checkpoints.save(2, {}, begin)
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written \((No space|lost.bin was).*; that of step 1"):
        checkpoints.wait()
    checkpoints.wait()
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["000001"]


def test_the_best_checkpoint_outlives_the_latest_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.save(step, {}, lambda folder: None)
        checkpoints.best_step = 2 if step >= 2 else None
    assert [folder.name for folder in sorted((tmp_path / "checkpoints").iterdir())] == ["000002", "000005", "000006"]
    latest = checkpoints.find_latest()
    assert latest and latest.step == 6


def test_only_a_better_evaluation_makes_a_checkpoint_the_best(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path)
    assert best.is_improved_by(0.0) and not best.is_improved_by(None)
    best.record(0, 0.4)
    assert not best.is_improved_by(0.4) and best.is_improved_by(0.5)
    best.record(10, 0.5)
    assert BestCheckpoint(tmp_path, step=20).step == 10


def test_an_evaluation_that_an_outage_cut_down_is_not_compared() -> None:
    assert measured_value({"eval/greedy": 1.0, "eval/tasks": 3.0, "eval/lost": 13.0}) is None
    assert measured_value({"eval/greedy": 0.5, "eval/tasks": 15.0, "eval/lost": 1.0}) == 0.5
    assert measured_value({"eval/tasks": 0.0, "eval/lost": 16.0}) is None and measured_value({}) is None


def test_a_run_that_goes_back_before_its_best_step_finds_the_best_again(tmp_path: Path) -> None:
    BestCheckpoint(tmp_path).record(10, 0.9)
    assert BestCheckpoint(tmp_path, step=7).is_improved_by(0.1)
    (tmp_path / BEST_FILE).write_text("{")
    assert BestCheckpoint(tmp_path, step=20).is_improved_by(0.1), "a damaged file costs only the memory of the best"
