"""The hash of a state: what counts, what does not, and content that was made to do harm."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from gateway.state import state_hash
from gateway.state.git_content import StateTooLarge
from gateway.state.state_hash import hash_state, is_repository


def folder_with(parent: Path, name: str, **files: str) -> Path:
    folder = parent / name
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


def git(folder: Path, *words: str, day: int = 1) -> None:
    date = f"2001-01-{day:02}T00:00:00"
    env = os.environ | {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date, "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)


def repository(parent: Path, name: str, day: int, text: str = "one") -> Path:
    folder = folder_with(parent, name, file=text)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "file")
    git(folder, "commit", "-q", "-m", "first", day=day)
    return folder


def test_names_bytes_links_and_executable_bits_count(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "a", one="1", two="2")
    hashes = [hash_state(folder)]
    changes = [
        lambda: (folder / "one").write_text("x"),
        lambda: (folder / "one").rename(folder / "uno"),
        lambda: (folder / "two").chmod(0o755),
        lambda: (folder / "link").symlink_to("two"),
        lambda: (folder / "empty").mkdir(),
        lambda: os.mkfifo(folder / "pipe"),
    ]
    for change in changes:
        change()
        hashes.append(hash_state(folder))
    assert len(set(hashes)) == len(changes) + 1


def test_times_places_and_ignored_files_do_not_count(tmp_path: Path) -> None:
    first, second = (folder_with(tmp_path, name, note=f"see {tmp_path}/{name}/note") for name in ("a", "b"))
    os.utime(second / "note", (1, 1))
    (second / "server.log").write_text("started at noon")
    assert hash_state(first) != hash_state(second)
    assert hash_state(first, ["*.log"]) == hash_state(second, ["*.log"])


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_databases_are_compared_by_their_rows(tmp_path: Path, mode: str) -> None:
    plain, other = folder_with(tmp_path, "a"), folder_with(tmp_path, "b")
    with sqlite3.connect(plain / "x.db") as database:
        database.execute("CREATE TABLE t (a, b)")
        database.executemany("INSERT INTO t VALUES (?, ?)", [(1, 2), (3, 4)])
    database.close()
    database = sqlite3.connect(other / "x.db")
    database.execute(f"PRAGMA journal_mode = {mode}")
    database.execute("CREATE TABLE t (a, b)")
    database.executemany("INSERT INTO t VALUES (?, ?)", [(3, 4), ("gone", None), (1, 2)])
    database.commit()
    database.execute("DELETE FROM t WHERE b IS NULL")
    database.commit()
    assert hash_state(plain) == hash_state(other)
    database.execute("INSERT INTO t VALUES (5, 6)")
    database.commit()
    assert hash_state(plain) != hash_state(other)
    database.close()


def test_repositories_are_compared_by_trees_and_messages(tmp_path: Path) -> None:
    first, second, third = repository(tmp_path, "a", 1), repository(tmp_path, "b", 2), repository(tmp_path, "c", 1, "2")
    git(second, "gc", "-q")
    assert is_repository(first / ".git") and hash_state(first) == hash_state(second) != hash_state(third)
    (second / "file").write_text("staged")
    changed = hash_state(second)
    git(second, "add", "file")
    staged = hash_state(second)
    git(second, "commit", "-q", "-m", "second")
    assert len({hash_state(first), changed, staged, hash_state(second)}) == 4


def test_configuration_of_a_repository_runs_nothing(tmp_path: Path) -> None:
    folder = repository(tmp_path, "a", 1)
    for key in ("core.fsmonitor", "core.pager", "diff.external", "core.sshCommand"):
        git(folder, "config", key, f"touch {tmp_path}/ran")
    hash_state(folder)
    assert not (tmp_path / "ran").exists()


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    secret = folder_with(tmp_path, "secret", key="first")
    folder = folder_with(tmp_path, "a")
    (folder / "link").symlink_to(secret / "key")
    (folder / "folder").symlink_to(secret)
    before = hash_state(folder)
    (secret / "key").write_text("second")
    assert hash_state(folder) == before


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000, b"\0\0\0\1" * 2000])
def test_broken_databases_count_by_their_bytes(tmp_path: Path, content: bytes) -> None:
    folder = folder_with(tmp_path, "a")
    (folder / "x.db").write_bytes(b"SQLite format 3\0" + content)
    before = hash_state(folder)
    (folder / "x.db").write_bytes(b"SQLite format 3\0" + content + b"x")
    assert hash_state(folder) != before


def test_too_much_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, "a", one="12345", two="12345")
    monkeypatch.setattr(state_hash, "MAX_BYTES", 9)
    with pytest.raises(StateTooLarge, match="more than"):
        hash_state(folder)
    monkeypatch.setattr(state_hash, "MAX_ENTRIES", 1)
    with pytest.raises(StateTooLarge, match="files"):
        hash_state(folder)


@pytest.mark.parametrize("place", ["refs", "objects", "HEAD"])
def test_repository_with_a_link_in_place_of_a_part_counts_as_files(tmp_path: Path, place: str) -> None:
    folder = repository(tmp_path, "linked", 1) / ".git"
    (folder / place).rename(tmp_path / "elsewhere")
    (folder / place).symlink_to(tmp_path / "elsewhere")
    before = hash_state(folder.parent)
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    assert not is_repository(folder) and hash_state(folder.parent) == before
