"""What breaks on the way costs a step at the most, and says how to go on."""

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

from tests.trainer.train.jobs import ROOT
from tests.trainer.train.trainings import Run, config, measured
from trainer.cli import app
from trainer.policy.policy import Policy
from trainer.run.file import Rollouts, Writer
from trainer.train.metrics import Metrics

WHOLE: dict[str, Any] = {"steps": 3, "prompts": 4, "n": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, and what made it."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, ["--config", config(**WHOLE), "--out", "r"])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def begun(whole: Path, place: Path) -> Path:
    """A run of one's own to spoil."""
    shutil.copytree(whole, place, dirs_exist_ok=True)
    return Path("r")


def test_a_broken_checkpoint_costs_a_step_and_the_numbers_are_the_same(run: Run, begun: Path) -> None:
    before = measured(begun)
    weights = begun / "checkpoints/000003/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    told = run("--resume", "--out", "r")
    assert "000003/model.safetensors is not what was written; going on from the one before it" in told
    assert "step 3 of 3" in told and "step 2 of 3" not in told
    assert measured(begun) == before


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew(run: Run, begun: Path) -> None:
    for state in begun.glob("checkpoints/*/state.json"):
        state.write_text("{")
    before = measured(begun)
    assert "none of 2 checkpoints is whole\n  remedy: restore" in run("--resume", "--out", "r", code=2)
    assert measured(begun) == before


def test_going_on_with_other_settings_is_refused_and_with_more_steps_is_not(run: Run, begun: Path) -> None:
    told = run("--resume", "--out", "r", "--seed", 7, code=2)
    assert "r: was begun with other settings: seed was 0, and is 7\n  remedy: leave that out" in told
    assert "there is a run already\n  remedy: go on with it by --resume" in run(
        "--config", "run.yaml", "--out", "r", code=2
    )
    assert "--steps: expected greater than 0, found 0" in run("--resume", "--out", "r", "--steps", 0, code=2)
    run("--resume", "--out", "r", "--steps", 4)
    assert [line["step"] for line in measured(begun)] == [1, 2, 3, 4]


def test_a_folder_that_another_process_writes_is_left_alone(run: Run, begun: Path) -> None:
    with (begun / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        told = run("--resume", "--out", "r", "--steps", 4, code=2)
    assert "r: another process trains here" in told and len(measured(begun)) == 3


def test_disks_that_fill_up_in_the_midst_of_weights_and_before_anything_began(run: Run) -> None:
    from tests.trainer.train.test_train_metrics import no_file_larger_than

    run_file = config(steps=1)
    with no_file_larger_than(400_000):
        told = run("--config", run_file, "--out", "r", code=2)
    assert "the checkpoint of step 1 cannot be written (" in told and "there is none yet\n  remedy: look at" in told
    with no_file_larger_than(1000):
        told = run("--config", run_file, "--out", "s", code=2)
    assert "the disk: cannot be written (File too large)" in told and "--out" in told


@contextmanager
def full(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int) -> Iterator[None]:
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
        (Writer, "_add", 20, "r/rollouts.jsonl: cannot be written (No space left on device)"),
    ],
)
def test_a_full_disk_is_told_and_the_run_goes_on_once_there_is_room(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: int, says: str
) -> None:
    config(**WHOLE)
    with full(monkeypatch, owner, name, after):
        told = run("--config", "run.yaml", "--out", "r", code=2)
    assert says in told and "remedy: make room" in told and "Traceback" not in told
    run("--resume", "--out", "r")
    assert measured("r") == measured(whole / "r")


def test_a_full_disk_where_metrics_are_written_is_told_as_well(
    run: Run, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(**WHOLE)
    Path("r").mkdir()
    Path("r/metrics.jsonl").symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "cut", lambda *_: [])
        told = run("--config", "run.yaml", "--out", "r", code=2)
    assert "metrics.jsonl: cannot be written (No space left on device)" in told and "go on with --resume" in told
    Path("r/metrics.jsonl").unlink()
    run("--resume", "--out", "r")
    assert measured("r") == measured(whole / "r")


DYING = '''
import os, runpy, sys
from pathlib import Path
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")

@server.tool()
def calculate(expression: str) -> str:
    """Works out a sum."""
    calls = Path(sys.argv[1])
    with calls.open("a") as told:
        told.write(".")
    if calls.stat().st_size >= 3 and not Path("died").exists():
        Path("died").touch()
        os._exit(1)
    return str(eval(expression, {"__builtins__": {}}))

server.run()
'''


def test_a_tool_server_that_dies_on_the_way_costs_its_rollouts_and_no_score(run: Run, place: Path) -> None:
    shutil.copytree(ROOT / "tool_configs", "tool_configs")
    Path("dying.py").write_text(DYING)
    servers = json.loads((ROOT / "mcp_servers.json").read_text())
    servers["mcpServers"]["calculator"] = {"command": sys.executable, "args": [str(place / "dying.py"), "calls"]}
    servers["mcpServers"]["notebook"]["cwd"] = "."
    Path("mcp_servers.json").write_text(json.dumps(servers))
    told = run("--config", config(tools="tool_configs", kinds=["sum"], steps=2, n=4), "--out", "r")
    lost = [rollout for rollout in Rollouts(Path("r")) if rollout.stop.infrastructure]
    assert lost and all(rollout.reward is None for rollout in lost), told
    assert sum(line["rollout/lost"] for line in measured("r")) == len(lost)
    assert sum(line.get("lost/tool_failed", 0) for line in measured("r")) == len(lost)
    assert [line["rollout/count"] for line in measured("r")] == [8, 8], "each was made anew"


# Where to go from here.


def test_the_end_says_where_things_are_and_what_to_ask_them(run: Run, begun: Path) -> None:
    told = run("--resume", "--out", "r", "--steps", 4)
    assert "4 steps are over; the model is r/checkpoints/000004" in told
    for words in ("plot r", "eval r", "show r"):
        assert f"mtrl-train {words} " in told
    assert "r: is a training run\n  remedy: name the step" in run("replay", "r", code=2)
    shown = run("show", "r", 0)
    assert "turn 0: policy" in shown and "look_up" in shown and "without text" not in shown
    assert "trained" in run("why", "r", 0, 30)
    kept = Path("r/checkpoints/000004")
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {
        file.name for file in kept.iterdir()
    }
    assert "step 1 of 1" in run("--config", config(model=str(kept), steps=1), "--out", "again")


def test_what_was_learned_is_compared_at_the_end_and_can_be_read_again(run: Run) -> None:
    looks = {"every": 0, "rows": 4, "after": True}
    told = run("--config", config(steps=1, evaluation=looks), "--out", "r")
    assert "success on 4 held-out tasks, before and after 1 steps" in told
    found = json.loads(Path("r/eval/comparison.json").read_text())
    assert json.loads(run("eval", "r", "--json").splitlines()[-1]) == found
    assert "── turn 0: policy" in run("show", "r/eval/greedy", 0)
