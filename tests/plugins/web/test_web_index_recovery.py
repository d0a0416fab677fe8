"""Tests that the index of rollouts recovers when its file or the run changes, fails or disappears."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from gateway.http.settings import Settings
from mtrl_plugins.web.app import POLL_S, serve_in_thread
from mtrl_plugins.web.runs import ViewedRun, name_runs
from tests.browser.sample_run import add_step, write_sample_run
from tests.plugins.web.test_web_api import get_rows, index_run
from trainer.storage.rollout_file import RolloutWriter

INDEX = "rollouts.jsonl.index"


def add_steps(live: Path, *steps: int) -> None:
    with RolloutWriter(live) as writer, (live / "metrics.jsonl").open("ab") as told:
        for step in steps:
            add_step(writer, told, step)


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


def overwrite(file: Path) -> None:
    file.write_bytes(b"no database" * 1000)


def truncate(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("damage", [Path.unlink, overwrite, truncate])
def test_damaged_index_is_rebuilt_while_run_is_viewed(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    live = write_sample_run(tmp_path / "live", steps=1)
    run = index_run(name_runs([live])[0])
    damage(live / INDEX)
    add_steps(live, 2)
    assert index_run(run).index.count == 32
    run.close()
    with sqlite3.connect(live / INDEX) as kept:
        assert kept.execute("SELECT COUNT(*) FROM rollouts").fetchone() == (32,)
    kept.close()


def test_replaced_run_is_indexed_again(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=2)
    run = index_run(name_runs([live])[0])
    assert run.rollout(31)["credited"]
    shutil.rmtree(live)
    write_sample_run(live, steps=3, seed=1)
    assert index_run(run).index.count == 48
    assert all(run.rollout(place)["credited"] for place in (0, 47))


def test_index_is_kept_in_memory_on_full_disk(tmp_path: Path) -> None:
    live = write_sample_run(tmp_path / "live", steps=1)
    run = index_run(name_runs([live])[0])
    add_steps(live, 2, 3)
    with file_size_limit((live / INDEX).stat().st_size):
        assert index_run(run).index.count == 48


def test_failing_index_is_logged_once_and_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = write_sample_run(tmp_path / "live", steps=1)
    again, failed = Event(), []

    def fails(run: ViewedRun) -> bool:
        if failed:
            again.set()
        failed.append(run)
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(ViewedRun, "update_index", fails)
    with caplog.at_level(logging.WARNING), serve_in_thread(name_runs([live]), Settings(port=0)) as url:
        assert again.wait(20 * POLL_S)
        assert get_rows(url.removesuffix("ui/") + "v1/runs/live")["total"] == 0
    assert [one.getMessage() for one in caplog.records] == [
        f"{live}: cannot index its rollouts for now (OSError: [Errno 116] Stale file handle)"
    ]
