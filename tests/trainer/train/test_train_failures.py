"""Failures during a training: they cost at most a step, and the message says how to resume."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.user_code import Journal
from tests.trainer.train.jobs import ROOT
from tests.trainer.train.trainings import Run, read_run_metrics, write_config
from trainer.cli import app
from trainer.policy.policy import Policy
from trainer.storage.rollout_file import Rollouts, RolloutWriter
from trainer.storage.run_files import MetricsWriter
from trainer.train.run_folder import JOURNAL

WHOLE: dict[str, Any] = {"steps": 3, "prompts": 4, "n": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, and what made it."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, ["--config", write_config(**WHOLE), "--out", "r"])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def begun(whole: Path, place: Path) -> Path:
    """A run of one's own to spoil."""
    shutil.copytree(whole, place, dirs_exist_ok=True)
    return Path("r")


def test_damaged_checkpoint_costs_one_step_and_metrics_stay_the_same(run: Run, begun: Path) -> None:
    before = read_run_metrics(begun)
    weights = begun / "checkpoints/000003/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    output = run("--resume", "--out", "r")
    assert "000003/model.safetensors has changed since it was written; using the previous checkpoint" in output
    assert "step 3 of 3" in output and "step 2 of 3" not in output
    assert read_run_metrics(begun) == before


def test_resumed_run_names_the_user_code_in_which_the_last_process_ended(run: Run, begun: Path) -> None:
    Journal(begun / JOURNAL).begin("rewards.mine")
    told = " ".join(run("--resume", "--out", "r").split())
    assert "while user code was running: rewards.mine remedy: if nobody killed it" in told
    assert "while user code" not in run("--resume", "--out", "r"), "that run has told its end"


def test_run_is_not_restarted_without_an_intact_checkpoint(run: Run, begun: Path) -> None:
    for state in begun.glob("checkpoints/*/state.json"):
        state.write_text("{")
    before = read_run_metrics(begun)
    assert "none of 2 checkpoints is intact\n  remedy: restore" in run("--resume", "--out", "r", code=2)
    assert read_run_metrics(begun) == before


def test_resuming_with_other_settings_is_refused_and_more_steps_are_accepted(run: Run, begun: Path) -> None:
    output = run("--resume", "--out", "r", "--seed", 7, code=2)
    assert "r: the run has other settings: seed was 0, and is now 7\n  remedy: undo these changes" in output
    assert "the folder already has a run\n  remedy: continue it with --resume" in run(
        "--config", "run.yaml", "--out", "r", code=2
    )
    assert "--steps: expected greater than 0, found 0" in run("--resume", "--out", "r", "--steps", 0, code=2)
    run("--resume", "--out", "r", "--steps", 4)
    assert [line["step"] for line in read_run_metrics(begun)] == [1, 2, 3, 4]


def test_folder_of_another_training_process_is_refused(run: Run, begun: Path) -> None:
    with (begun / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        output = run("--resume", "--out", "r", "--steps", 4, code=2)
    assert "r: another process is training in this folder" in output and len(read_run_metrics(begun)) == 3


def test_disk_full_while_writing_weights_or_at_the_start_is_reported(run: Run) -> None:
    from tests.trainer.train.test_train_metrics import file_size_limit

    run_file = write_config(steps=1)
    with file_size_limit(400_000):
        output = run("--config", run_file, "--out", "r", code=2)
    assert "the checkpoint of step 1 cannot be written (" in output
    assert "there is no earlier one\n  remedy: raise the limit on the size of files (`ulimit -f`" in output
    with file_size_limit(1000):
        output = run("--config", run_file, "--out", "s", code=2)
    assert "s/run.json: cannot be written (File too large)" in output and "--out" in output


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int) -> Iterator[None]:
    """A disk without room, from a method's so-manieth call on."""
    calls, real = 0, getattr(owner, name)

    def refuse(self: Any, *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        yield


@pytest.mark.parametrize(
    ("owner", "name", "after", "says"),
    [
        (Policy, "save", 1, "the checkpoint of step 2 cannot be written (No space left on device); that of step 1"),
        (RolloutWriter, "_add", 20, "r/rollouts.jsonl: cannot be written (No space left on device)"),
    ],
)
def test_run_stopped_by_a_full_disk_resumes_once_there_is_space(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int, says: str
) -> None:
    write_config(**WHOLE)
    with full_disk(monkeypatch, owner, name, after):
        output = run("--config", "run.yaml", "--out", "r", code=2)
    assert says in output and "remedy: make room on " in output and "Traceback" not in output
    run("--resume", "--out", "r")
    assert read_run_metrics("r") == read_run_metrics(whole / "r")


def test_full_disk_while_writing_metrics_is_reported(run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(**WHOLE)
    Path("r").mkdir()
    Path("r/metrics.jsonl").symlink_to("/dev/full")
    Path("r/.lock").touch()  # As of an earlier start.
    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "truncate_after", lambda *_: [])
        output = run("--config", "run.yaml", "--out", "r", code=2)
    assert (
        "metrics.jsonl: cannot be written (No space left on device)" in output
        and "continue with `mtrl-train --resume --out r`" in output
    )
    Path("r/metrics.jsonl").unlink()
    run("--resume", "--out", "r")
    assert read_run_metrics("r") == read_run_metrics(whole / "r")


DYING = '''
import os, runpy, sys
from pathlib import Path
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")

@server.tool()
def calculate(expression: str) -> str:
    """Works out a sum."""
    calls = Path(sys.argv[1])
    with calls.open("a") as output:
        output.write(".")
    if calls.stat().st_size >= 3 and not Path("died").exists():
        Path("died").touch()
        os._exit(1)
    return str(eval(expression, {"__builtins__": {}}))

server.run()
'''


def test_dying_tool_server_loses_rollouts_without_scoring_them(run: Run, place: Path) -> None:
    shutil.copytree(ROOT / "tool_configs", "tool_configs")
    Path("dying.py").write_text(DYING)
    servers = json.loads((ROOT / "mcp_servers.json").read_text())
    servers["mcpServers"]["calculator"] = {"command": sys.executable, "args": [str(place / "dying.py"), "calls"]}
    servers["mcpServers"]["notebook"]["cwd"] = "."
    Path("mcp_servers.json").write_text(json.dumps(servers))
    output = run("--config", write_config(tools="tool_configs", demo={"kinds": ["sum"]}, steps=2, n=4), "--out", "r")
    lost = [rollout for rollout in Rollouts(Path("r")) if rollout.stop.is_infrastructure]
    assert lost and all(rollout.reward is None for rollout in lost), output
    assert sum(line["rollout/lost"] for line in read_run_metrics("r")) == len(lost)
    assert sum(line.get("lost/tool_failed", 0) for line in read_run_metrics("r")) == len(lost)
    assert [line["rollout/count"] for line in read_run_metrics("r")] == [8, 8], "each was made anew"


# Where to go from here.


def test_end_of_a_run_names_its_model_and_next_commands(run: Run, begun: Path) -> None:
    output = run("--resume", "--out", "r", "--steps", 4)
    assert "4 steps are finished; the model is in r/checkpoints/000004" in output
    for words in ("plot r", "eval r", "show r"):
        assert f"mtrl-train {words} " in output
    assert "r: is a training run\n  remedy: name the step" in run("replay", "r", code=2)
    shown = run("show", "r", 0)
    assert "turn 0: policy" in shown and "look_up" in shown and "without text" not in shown
    assert "trained" in run("why", "r", 0, 30)
    kept = Path("r/checkpoints/000004")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in kept.iterdir()
    }
    assert "step 1 of 1" in run("--config", write_config(model=str(kept), steps=1), "--out", "again")


def test_comparison_at_the_end_can_be_read_again(run: Run) -> None:
    looks = {"every": 0, "rows": 4, "after": True}
    output = run("--config", write_config(steps=1, evaluation=looks), "--out", "r")
    assert "success on 4 held-out tasks, before and after 1 steps" in output
    found = json.loads(Path("r/eval/comparison.json").read_text())
    assert json.loads(run("eval", "r", "--json").splitlines()[-1]) == found
    assert json.loads(Path("r/eval-1/comparison.json").read_text()) == found, "the earlier one is kept"
    assert "── turn 0: policy" in run("show", "r/eval/greedy", 0)
