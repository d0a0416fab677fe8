"""Folders that a killed process left on a disk are removed by the next process; those of living writers stay."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.trainer.processes import run_process, wait_until
from trainer.storage.temporary_folder import ABANDONED_S, LOCK, TemporaryFolder

HOLD = """
import time
from pathlib import Path
from trainer.storage.temporary_folder import TemporaryFolder

folder = TemporaryFolder(Path("root"))
time.sleep(600)
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder that a killed process left."""
    (root := tmp_path / "root").mkdir()
    (tmp_path / "hold.py").write_text(HOLD)
    with run_process(tmp_path, "hold.py") as process:
        wait_until(lambda: any(root.glob(f"*/{LOCK}")), process)
    (folder,) = root.iterdir()
    (folder / "weights").mkdir()
    return folder


def make_next(left: Path) -> None:
    TemporaryFolder(left.parent).remove()


def age(folder: Path) -> None:
    changed = (folder / LOCK).stat().st_mtime - 2 * ABANDONED_S
    os.utime(folder / LOCK, (changed, changed))


def test_next_folder_removes_that_of_a_killed_process_and_leaves_those_of_living_ones_and_of_others(left: Path) -> None:
    (others := left.parent / "others").mkdir()
    with TemporaryFolder(others) as living:
        age(living.path)
        living.path.rename(left.parent / "living")
        make_next(left)
        assert {folder.name for folder in left.parent.iterdir()} == {"others", "living"}


def test_folder_of_another_machine_is_removed_only_when_it_is_old(left: Path) -> None:
    """Its lock can be taken, but not every file system shows the locks of other machines."""
    (left / LOCK).write_text("another-kernel 1")
    make_next(left)
    assert left.is_dir()
    age(left)
    make_next(left)
    assert not left.exists()


def test_without_locks_folders_are_removed_only_when_they_are_old(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    make_next(left)
    assert [*left.parent.iterdir()] == [left]
    age(left)
    make_next(left)
    assert not left.exists()
