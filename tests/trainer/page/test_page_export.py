"""One file holds what can be read of a run, says what it left out, and stays small enough to send."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.wire import dumps
from tests.browser.made_run import HOSTILE, made
from trainer.cli import app
from trainer.page import export as exporting
from trainer.page.export import export, joined
from trainer.page.runs import named

HOSTILE_AT = 20


def held(file: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="kept">(.*?)</script>', file.read_text(), re.DOTALL)
    assert found
    (run,) = json.loads(found[1])["runs"].values()
    return dict(run)


def test_an_export_holds_hostile_text_as_data(tmp_path: Path) -> None:
    export(named([made(tmp_path / "run", steps=2)]), tmp_path / "e.html", [HOSTILE_AT])
    page = (tmp_path / "e.html").read_text()
    assert HOSTILE not in page and "\\u003cscript>document.title" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "import " not in joined("app.js").replace(
        "\nimport(", ""
    )


def test_what_is_damaged_is_left_out_and_counted(tmp_path: Path) -> None:
    run = made(tmp_path / "run", steps=2)
    lines = (run / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (run / "rollouts.jsonl").write_bytes(b"".join([lines[0], b"{}\n", *lines[2:]]))
    picture = next(iter((run / "blobs").iterdir()))
    shown = sum(picture.name.encode() in line for line in lines)
    picture.unlink()
    said = export(named([run]), tmp_path / "e.html")
    assert said == (
        f"run: 32 of 32 rollouts are listed, {31 - shown} are there token by token; {1 + shown} that cannot be read"
        " are not"
    )
    found = held(tmp_path / "e.html")
    assert len(found["rows"]) == 32 and len(found["rollouts"]) == 31 - shown and "1" not in found["rollouts"]


def test_pictures_count_among_the_bytes_that_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "run", steps=2)
    export(named([run]), tmp_path / "whole.html")
    whole = held(tmp_path / "whole.html")
    bare = sum(len(dumps(one)) for one in whole["rollouts"].values())
    pictures = sum(map(len, whole["blobs"].values()))
    assert len(whole["rollouts"]) == 32 and pictures > 0
    monkeypatch.setattr(exporting, "WHOLE_BYTES", bare)
    export(named([run]), tmp_path / "less.html")
    less = held(tmp_path / "less.html")
    assert 0 < len(less["rollouts"]) < 32
    rollouts = sum(len(dumps(one)) for one in less["rollouts"].values())
    assert rollouts + sum(map(len, less["blobs"].values())) <= bare


@pytest.mark.parametrize("asked", ["9999", "-3", str(10**30)])
def test_a_rollout_that_is_not_there_is_told_with_a_remedy(tmp_path: Path, asked: str) -> None:
    run = made(tmp_path / "run", steps=1)
    done = CliRunner().invoke(app, ["view", str(run), "--export", str(tmp_path / "e.html"), f"--rollout={asked}"])
    assert done.exit_code == 2 and not (tmp_path / "e.html").exists()
    assert f"{run}: there is no rollout {asked}" in done.output
    assert "remedy: name one from 0 to 15 with --rollout" in done.output


def test_a_damaged_rollout_that_was_asked_for_is_told_with_its_line(tmp_path: Path) -> None:
    run = made(tmp_path / "run", steps=1)
    (run / "rollouts.jsonl").write_bytes(b"{}\n" + (run / "rollouts.jsonl").read_bytes())
    done = CliRunner().invoke(app, ["view", str(run), "--export", str(tmp_path / "e.html"), "--rollout", "0"])
    assert done.exit_code == 2 and "rollouts.jsonl: line 1: the line is damaged" in done.output
    assert "remedy: " in done.output
