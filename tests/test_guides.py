"""The guides for those who move in: what they show runs as it is, and their tables are those in code."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app as gateway_app
from tests.blocks import blocks_of, split, typed, written
from tests.guides import ROOT, SWIFT, VERL, whole
from tests.imported import fresh
from tests.trainer.models import tiny_model
from trainer.cli import app as trainer_app

__all__ = ["fresh"]

APPS = {"mtrl-gateway": gateway_app, "mtrl-train": trainer_app}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a person is who reads the guide."""
    tiny_model(tmp_path / "models" / "Qwen2.5-0.5B-Instruct", kind="qwen2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def typed_in(line: str) -> str:
    """What a line prints."""
    words, _ = split(line)
    if words[0] == "python":
        runpy.run_path(words[1], run_name="__main__")
        return ""
    done = CliRunner().invoke(APPS[words[0]], words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
    return done.output


@pytest.mark.parametrize("guide", [VERL, SWIFT], ids=["verl", "swift"])
def test_a_guides_example_runs_line_by_line_where_the_other_package_is_not_installed(guide: Path, place: Path) -> None:
    assert importlib.util.find_spec("verl") is None and importlib.util.find_spec("swift") is None
    blocks = blocks_of(guide)
    written(blocks, place)
    printed = [typed_in(line) for line in typed(blocks)]
    assert any("The same here" in text and " -> " in text for text in printed)
    assert (place / "runs" / "moved" / "metrics.jsonl").is_file()
    assert "policy" in printed[-1]
    assert not [block for block in blocks if block.file is None and block.language not in ("bash", "text")], (
        "whatever a guide shows has a name, and is used"
    )


def test_the_tables_of_the_guides_are_those_in_code() -> None:
    for guide, text in whole():
        assert guide.read_text(encoding="utf-8") == text, "write them anew: python -m tests.guides"


def test_the_readme_leads_to_both_guides() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for guide in (VERL, SWIFT):
        assert f"({guide.relative_to(ROOT).as_posix()})" in text
