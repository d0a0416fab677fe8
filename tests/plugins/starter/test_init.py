"""`mtrl-train init`: a folder that runs at once, whose every line is explained and whose own tests pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from gateway.config import editor_schema
from mtrl_plugins.starter.write_job import write_job
from tests.trainer.cli_data import RunCommand
from tests.trainer.train.jobs import demo_model
from trainer.storage.run_files import read_metrics
from trainer.train.run_schema import RUN_SCHEMA


@pytest.fixture
def job(place: Path) -> Path:
    """A new job whose model is one that the tests have."""
    file = write_job(Path("my_job"))
    file.write_text(file.read_text().replace("model: demo", f"model: {demo_model()}"))
    return file


def explained_lines(text: str) -> list[tuple[str, str]]:
    """Each line with a key, and the line above it."""
    lines = [line.strip() for line in text.splitlines()]
    return [(line, above) for above, line in pairwise(lines) if line and not line.startswith("#")]


def test_job_trains_at_once_wherever_it_is_started(run: RunCommand, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no problems found" in run("--config", job, "--dry-run").output
    monkeypatch.chdir("my_job/tools")
    run("--config", "../run.yaml", "--steps", 2, "--out", "../../runs/a")
    assert [line["step"] for line in read_metrics(Path("../../runs/a/metrics.jsonl"))] == [0, 1, 2]


def test_generated_tests_pass_under_plain_pytest(run: RunCommand, place: Path) -> None:
    output = run("init", "my_job").output
    assert "pytest my_job" in output and "mtrl-train --config my_job/run.yaml --dry-run" in output
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_job"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "5 passed" in done.stdout, done.stdout + done.stderr


def test_every_line_is_explained_and_known_to_the_schema(place: Path) -> None:
    text = write_job(Path("my_job")).read_text()
    names = {"right:"}  # What a component is called is the user's choice.
    assert [line for line, above in explained_lines(text) if not above.startswith("#") and line not in names] == []
    schema = Path("my_job") / text.splitlines()[0].partition("$schema=")[2]
    assert schema.read_text() == RUN_SCHEMA.read_text()
    tools = Path("my_job/tools/tools.yaml").read_text().splitlines()[0].partition("$schema=")[2]
    assert json.loads((Path("my_job/tools") / tools).read_text())["title"] == "mtrl tool_configs/*.yaml"
    assert {file.name for file in Path("my_job/.schemas").iterdir()} == {
        RUN_SCHEMA.name, *(file.name for file in editor_schema.SCHEMA_FILES),
    }  # fmt: skip


def test_model_of_the_users_own_is_named_from_the_run_file(run: RunCommand, place: Path, model: Path) -> None:
    Path("models").symlink_to(model.parent)
    run("init", "jobs/mine", "--model", f"models/{model.name}")
    settings = yaml.safe_load(Path("jobs/mine/run.yaml").read_text())
    assert settings["model"] == f"../../models/{model.name}" and "update" not in settings
    assert "no problems found" in run("--config", "jobs/mine/run.yaml", "--dry-run").output


def test_nothing_is_overwritten(run: RunCommand, place: Path) -> None:
    Path("my_job").mkdir()
    Path("my_job/mine.txt").write_text("mine")
    assert "my_job: is not empty, and nothing is overwritten" in run("init", "my_job", code=2).output
    assert [file.name for file in Path("my_job").iterdir()] == ["mine.txt"]
    Path("empty").mkdir()
    run("init", "empty")
    assert Path("empty/run.yaml").is_file()
    assert sorted(os.listdir()) == ["empty", "my_job"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["file"], "is a file, and nothing is overwritten"),
        ([""], "FOLDER: is empty"),
        (["file/job"], "file/job: cannot be made"),
        (["job", "--model", "nowhere"], "there is no config.json"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    run: RunCommand, place: Path, words: list[str], problem: str
) -> None:
    Path("file").write_text("text")
    assert problem in run("init", *words, code=2).output
    assert os.listdir() == ["file"]
