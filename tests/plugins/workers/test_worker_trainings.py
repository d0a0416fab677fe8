"""Trainings whose rollouts workers play: the same as without, also if workers and the trainer itself are killed."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from gateway.errors import ConfigError
from mtrl_plugins.workers.line_channel import TOKEN_VARIABLE
from mtrl_plugins.workers.settings import WorkerSettings
from mtrl_plugins.workers.worker_pool import read_worker_token
from tests.plugins.workers.pools import list_workers
from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.jobs import small_job
from tests.trainer.train.trainings import count_lines, read_metrics_without_times
from trainer.cli import app
from trainer.storage.rollout_file import Rollouts

STEPS = 40
"""More than a quick machine takes while a worker is started again."""
TOOLS = """
tools:
  - {class_name: mtrl_plugins.demo.facts.lookup.LookUp, pure: true}
  - {function: "calculator:calculate", pure: true}
"""
CALCULATOR = 'def calculate(expression: str) -> str:\n    """Works out a sum."""\n    return "0"\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("trainings")
    (place / "tools").mkdir()
    (place / "tools/tools.yaml").write_text(TOOLS)
    (place / "tools/calculator.py").write_text(CALCULATOR)
    changes: dict[str, Any] = {
        "steps": STEPS, "demo": {"kinds": ("fact",)}, "record": False, "tools": "tools", "prompts": 2, "n": 2,
        "update": {"lr": 1e-3, "warmup_steps": 1, "lr_scheduler": "linear"}, "evaluation": {"every": 0},
    }  # fmt: skip
    for workers in range(3):
        settings = small_job(**changes, rollout={"workers": workers})
        (place / f"run{workers}.yaml").write_text(settings.model_dump_json())
    return place


def read_repeated(run: Path) -> list[dict[str, Any]]:
    """The metrics but for times and workers."""
    lines = read_metrics_without_times(run)
    return [{name: value for name, value in line.items() if not name.startswith("workers/")} for line in lines]


def read_tokens(run: Path) -> list[Any]:
    return [
        (rollout.name, rollout.stop, rollout.rewards, [(entry.ids, entry.logprobs) for entry in rollout.ledger])
        for rollout in Rollouts(run)
    ]


def end_with(process: subprocess.Popen[str], number: int) -> str:
    """Sends the signal to the trainer, and asserts that nothing is left of it and its workers."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [], output
    return output


def train_here(place: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Trains in this process, which has everything imported."""
    monkeypatch.chdir(place)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


def test_training_with_workers_is_the_same_through_kills_of_workers_and_of_itself(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "disturbed"
    train_here(place, monkeypatch, "--config", "run0.yaml", "--out", str(alone))
    with run_process(place, "-m", "trainer.cli", "--config", "run2.yaml", "--out", str(run)) as process:
        wait_until(lambda: count_lines(run) > 1, process)
        trainer = psutil.Process(process.pid)
        killed = list_workers(trainer, "worker-0")[0]
        killed.kill()
        wait_until(lambda: any(worker != killed for worker in list_workers(trainer, "worker-0")), process)
        wait_until(lambda: count_lines(run) > 3, process)
        output = end_with(process, signal.SIGINT)
        assert process.returncode == 130 and "resume with: mtrl-train --resume" in output, output
        assert "the rollout worker worker-0 ended: killed by signal 9" in output
    with run_process(place, "-m", "trainer.cli", "--resume", "--out", str(run)) as process:
        wait_until(lambda: count_lines(run) > 8, process)
        end_with(process, signal.SIGKILL)
    output = train_here(place, monkeypatch, "--resume", "--out", str(run))
    assert "rollouts are played by rollout workers: 2 of 2 up" in output
    assert read_repeated(run) == read_repeated(alone)
    assert read_tokens(run) == read_tokens(alone)


def test_evaluation_at_the_end_is_played_by_workers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = json.loads((place / "run1.yaml").read_text())
    settings |= {"steps": 1, "evaluation": {"every": 0, "final_rows": 2, "after": True}}
    (place / "looks.yaml").write_text(json.dumps(settings))
    output = train_here(place, monkeypatch, "--config", "looks.yaml", "--out", "looks")
    assert "success on 2 held-out tasks" in output and (place / "looks/eval/worker-0.log").exists()


def test_worker_that_cannot_start_ends_the_run_with_its_reason(place: Path) -> None:
    """The tools are there for the trainer, and fail where their file is imported by a worker."""
    folder = place / "broken"
    folder.mkdir()
    fails_there = 'import sys\nif "worker" in sys.argv:\n    raise RuntimeError("not on this machine")\n\n\n'
    (folder / "calculator.py").write_text(fails_there + CALCULATOR)
    (folder / "tools.yaml").write_text(TOOLS)
    words = ("--config", "run1.yaml", "--tools", "broken", "--out", "never")
    with run_process(place, "-m", "trainer.cli", *words) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 2 and "Traceback" not in output
    assert "the rollout worker worker-" in output and "cannot start" in output and "not on this machine" in output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"record": True}, "`rollout` and `record` exclude each other"),
        ({"agent": {"external": True}}, "excludes `agent.external`"),
        ({"rollout": {"listen": "nowhere"}}, "should be host:port"),
    ],
)
def test_settings_that_workers_cannot_have_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small_job(**{"record": False, "rollout": {"workers": 1}, **changes})


def test_listening_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = WorkerSettings(listen="127.0.0.1:0")
    for token in ("", "short"):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with pytest.raises(ConfigError, match=f"export {TOKEN_VARIABLE}="):
            read_worker_token(settings)
    assert read_worker_token(WorkerSettings(workers=2)) == ""
