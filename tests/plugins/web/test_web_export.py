"""Tests the export of runs as one HTML file: its content, size limits, and damaged or missing rollouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.wire import dumps
from mtrl_plugins.web import export as exporting
from mtrl_plugins.web.export import bundle_modules, export_runs
from mtrl_plugins.web.runs import name_runs
from tests.browser.sample_run import HOSTILE, write_sample_run
from trainer.cli import app

HOSTILE_AT = 20


def read_export(file: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="kept">(.*?)</script>', file.read_text(), re.DOTALL)
    assert found
    (run,) = json.loads(found[1])["runs"].values()
    return dict(run)


def test_export_escapes_hostile_text(tmp_path: Path) -> None:
    export_runs(name_runs([write_sample_run(tmp_path / "run", steps=2)]), tmp_path / "e.html", [HOSTILE_AT])
    page = (tmp_path / "e.html").read_text()
    assert HOSTILE not in page and "\\u003cscript>document.title" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "import " not in bundle_modules("app.js").replace(
        "\nimport(", ""
    )


def test_export_counts_unreadable_rollouts(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run", steps=2)
    lines = (run / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    (run / "rollouts.jsonl").write_bytes(b"".join([lines[0], b"{}\n", *lines[2:]]))
    picture = next(iter((run / "blobs").iterdir()))
    shown = sum(picture.name.encode() in line for line in lines)
    picture.unlink()
    said = export_runs(name_runs([run]), tmp_path / "e.html")
    assert said == (f"run: 32 of 32 rollouts are listed, {31 - shown} token by token; {1 + shown} are unreadable")
    found = read_export(tmp_path / "e.html")
    assert len(found["rows"]) == 32 and len(found["rollouts"]) == 31 - shown and "1" not in found["rollouts"]


def test_export_limit_includes_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_sample_run(tmp_path / "run", steps=2)
    export_runs(name_runs([run]), tmp_path / "whole.html")
    whole = read_export(tmp_path / "whole.html")
    bare = sum(len(dumps(one)) for one in whole["rollouts"].values())
    pictures = sum(map(len, whole["blobs"].values()))
    assert len(whole["rollouts"]) == 32 and pictures > 0
    monkeypatch.setattr(exporting, "MAX_ROLLOUT_BYTES", bare)
    export_runs(name_runs([run]), tmp_path / "less.html")
    less = read_export(tmp_path / "less.html")
    assert 0 < len(less["rollouts"]) < 32
    rollouts = sum(len(dumps(one)) for one in less["rollouts"].values())
    assert rollouts + sum(map(len, less["blobs"].values())) <= bare


@pytest.mark.parametrize("number", ["9999", "-3", str(10**30)])
def test_export_of_missing_rollout_fails_with_remedy(tmp_path: Path, number: str) -> None:
    run = write_sample_run(tmp_path / "run", steps=1)
    done = CliRunner().invoke(app, ["view", str(run), "--export", str(tmp_path / "e.html"), f"--rollout={number}"])
    assert done.exit_code == 2 and not (tmp_path / "e.html").exists()
    assert f"{run}: there is no rollout {number}" in done.output
    assert "remedy: name one from 0 to 15 with --rollout" in done.output


def test_export_of_damaged_rollout_fails_with_its_line(tmp_path: Path) -> None:
    run = write_sample_run(tmp_path / "run", steps=1)
    (run / "rollouts.jsonl").write_bytes(b"{}\n" + (run / "rollouts.jsonl").read_bytes())
    done = CliRunner().invoke(app, ["view", str(run), "--export", str(tmp_path / "e.html"), "--rollout", "0"])
    assert done.exit_code == 2 and "rollouts.jsonl: line 1: the line is damaged" in done.output
    assert "remedy: " in done.output
