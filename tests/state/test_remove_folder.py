"""Folders are removed with all that is in them, even what a program closed to everybody."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from gateway.state.remove_folder import remove_folder

NOBODY = 65534


def remove_as_a_user(folder: Path) -> int:
    """Removes a folder in a child that is not root's, whom modes do not stop; the child's exit status."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            remove_folder(folder)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_folders_that_nobody_may_open_are_removed_by_a_user_who_is_not_root() -> None:
    parent = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users.
    try:
        parent.chmod(0o777)
        folder = parent / "rollout"
        closed = folder / "open" / "closed"
        (closed / "deep").mkdir(parents=True)
        (closed / "deep" / "file").write_text("1")
        (folder / "kept").symlink_to(parent)
        if os.geteuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        for path in (closed / "deep", closed, folder):
            path.chmod(0)
        assert remove_as_a_user(folder) == 0
        assert not os.path.lexists(folder) and parent.is_dir()
    finally:
        shutil.rmtree(parent)


def test_folder_of_a_folder_that_is_gone_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    remove_folder(tmp_path / "gone")
    assert tmp_path.stat().st_mode & 0o777 == 0o755
