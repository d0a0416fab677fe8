"""What is listed of a run stays right, whatever becomes of its files while it is looked at."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from gateway.http.settings import Settings
from tests.browser.made_run import add, made
from tests.trainer.page.test_page_data import listed, rows
from tests.trainer.train.test_train_metrics import no_file_larger_than
from trainer.page.query import query
from trainer.page.runs import Run, named
from trainer.page.serve import LOOK_S, beside
from trainer.run.file import Writer

INDEX = "rollouts.jsonl.index"


def more(live: Path, *steps: int) -> None:
    with Writer(live) as writer, (live / "metrics.jsonl").open("ab") as told:
        for step in steps:
            add(writer, told, step)


def spoil(file: Path) -> None:
    file.write_bytes(b"no database" * 1000)


def empty(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize("mishap", [Path.unlink, spoil, empty])
def test_a_list_that_is_deleted_or_spoilt_is_made_anew_while_it_is_shown(
    tmp_path: Path, mishap: Callable[[Path], None]
) -> None:
    live = made(tmp_path / "live", steps=1)
    run = listed(named([live])[0])
    mishap(live / INDEX)
    more(live, 2)
    assert listed(run).index.known == 32
    run.stop()
    with sqlite3.connect(live / INDEX) as kept:
        assert kept.execute("SELECT COUNT(*) FROM rollouts").fetchone() == (32,)
    kept.close()


def test_a_search_begins_anew_with_the_list(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=1)
    run = listed(named([live])[0])
    asked = query({"q": "never guess"})
    assert run.rollouts(asked)["total"] == 16
    (live / INDEX).unlink()
    more(live, 2)
    assert listed(run).rollouts(asked)["total"] == 32


def test_a_run_that_is_made_anew_in_its_folder_is_listed_anew(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=2)
    run = listed(named([live])[0])
    assert run.rollout(31)["credited"]
    shutil.rmtree(live)
    made(live, steps=3, seed=1)
    assert listed(run).index.known == 48
    assert all(run.rollout(place)["credited"] for place in (0, 47))


def test_where_there_is_no_room_the_list_is_kept_in_memory(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=1)
    run = listed(named([live])[0])
    more(live, 2, 3)
    with no_file_larger_than((live / INDEX).stat().st_size):
        assert listed(run).index.known == 48


def test_a_page_stays_while_the_list_of_its_run_is_deleted(tmp_path: Path) -> None:
    live = made(tmp_path / "live", steps=1)
    with beside([listed(named([live])[0])], Settings(port=0)) as url:
        at = url.removesuffix("ui/") + "v1/runs/live"
        (live / INDEX).unlink()
        more(live, 2)
        until = time.monotonic() + 20
        while rows(at)["total"] < 32 and time.monotonic() < until:
            pass
        assert rows(at)["total"] == 32


def test_what_cannot_be_listed_ends_no_page_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = made(tmp_path / "live", steps=1)
    again, failed = Event(), []

    def fails(run: Run) -> bool:
        if failed:
            again.set()
        failed.append(run)
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Run, "grow", fails)
    with caplog.at_level(logging.WARNING), beside(named([live]), Settings(port=0)) as url:
        assert again.wait(20 * LOOK_S)
        assert rows(url.removesuffix("ui/") + "v1/runs/live")["total"] == 0
    assert [one.getMessage() for one in caplog.records] == [
        f"{live}: its rollouts cannot be listed for now (OSError: [Errno 116] Stale file handle)"
    ]
