"""What run.json keeps of a run's data and code, and what `--resume` says of data that has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.trainer.train.trainings import Run, user_reward, write_config


def write_rows(rows: int = 6, *, changed: int = -1) -> None:
    lines = [{"id": f"t{number}", "prompt": f"{number + 10 * (number == changed)} + 1"} for number in range(rows)]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def kept(steps: int) -> dict[str, Any]:
    """What the run keeps; it is to go on until this step."""
    about: dict[str, Any] = json.loads(Path("r/run.json").read_text())
    about["settings"]["steps"] = steps
    Path("r/run.json").write_text(json.dumps(about))
    return about


def test_a_resumed_run_names_data_that_has_changed_and_keeps_which_steps_trained_on_which(run: Run) -> None:
    write_rows()
    config = write_config(steps=1, data="rows.jsonl", demo={}, reward=user_reward("return 0.5"))
    run("--config", config, "--out", "r")
    first = kept(2)["data"]["1"]
    assert "has changed" not in run("--resume", "--out", "r")
    write_rows(changed=2)
    kept(3)
    assert "rows.jsonl has changed since the run was started: steps from 3 on" in run("--resume", "--out", "r")
    data = kept(4)["data"]
    assert data["1"] == data["2"] == first != data["3"]
    assert "has changed" not in run("--resume", "--out", "r"), "the rows of step 3"
    write_rows(7, changed=2)
    kept(5)
    assert "has changed" in run("--resume", "--out", "r")


def test_a_run_in_a_repository_keeps_the_commit(run: Run) -> None:
    import subprocess

    run("--config", write_config(steps=1), "--out", "plain")
    assert json.loads(Path("plain/run.json").read_text())["git"] is None
    author = ("-c", "user.name=me", "-c", "user.email=me@host")
    for words in (["init", "-q"], ["add", "run.yaml"], [*author, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *words], check=True)
    run("--config", write_config(steps=1, seed=2), "--out", "r")
    git = json.loads(Path("r/run.json").read_text())["git"]
    assert len(git["commit"]) == 40 and git["has_changes"]
