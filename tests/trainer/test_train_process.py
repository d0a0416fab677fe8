"""The trainer as a process: signals, children, a remote gateway, and a fast `--help`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gateway.gateway import Gateway
from tests.live_server import live_server
from tests.trainer.policy_scripts import render_calls
from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from trainer.rollout.rollout import StopReason
from trainer.storage.rollout_file import Rollouts

ROOT = Path(__file__).parents[2]
SCRIPTED = Path(__file__).with_name("scripted_train.py")
LEAVE_S = 90.0

SLOW = '''
import time
import anyio

async def wait() -> str:
    """Never answers."""
    await anyio.sleep_forever()

def doze() -> str:
    """Holds a thread for a minute."""
    open("dozing", "w").close()
    time.sleep(60)
    return "awake"
'''


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The shipped configuration, and tools that hold whoever calls them."""
    tools = tmp_path / "tool_configs"
    tools.mkdir()
    (tools / "slow.py").write_text(SLOW)
    (tools / "tools.yaml").write_text(
        "tools:\n  - function: slow:wait\n  - function: slow:doze\n  - server: notebook\n    isolation: process\n"
        "    warm: 1\n"
    )
    notebook = str(ROOT / "tool_configs/servers/notebook.py")
    servers = {"mcpServers": {"notebook": {"command": sys.executable, "args": [notebook]}}}
    (tmp_path / "mcp_servers.json").write_text(json.dumps(servers))
    return tmp_path


def saved(run: Path) -> int:
    return len(Rollouts(run)) if (run / "rollouts.jsonl").exists() else 0


def interrupted(process: subprocess.Popen[str]) -> str:
    """Sends SIGINT and returns the output; asserts that the process and its children end in time."""
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - began < LEAVE_S, output
    assert process.returncode == 130, output
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    return output


def rows(place: Path, *ids: str) -> str:
    file = place / "tasks.jsonl"
    file.write_text("".join(json.dumps({"id": id, "prompt": f"What of {id}?"}) + "\n" for id in ids))
    return str(file)


@pytest.mark.parametrize("tool", ["wait", "doze"])
def test_ctrl_c_closes_everything_and_saves_finished_rollouts(tool: str, place: Path, model: Path) -> None:
    says = {
        "quick": [render_calls(("write_note", {"text": "kept"})), "done"],
        "held": [render_calls(("write_note", {"text": "lost"})), render_calls((tool, {}))],
    }
    (place / "says.json").write_text(json.dumps(says))
    words = ("--model", str(model), "--data", rows(place, "quick", "held"), "--out", "runs/a", "--n", "2", "--record")
    with run_process(place, str(SCRIPTED), "says.json", "rollout", *words) as process:
        wait_until(lambda: saved(place / "runs/a") == 2 and (tool == "wait" or (place / "dozing").exists()), process)
        output = interrupted(process)
    assert "mtrl-train: stopped; rollouts that ended before are saved" in output and "Traceback" not in output
    rollouts = list(Rollouts(place / "runs/a"))
    assert {rollout.task for rollout in rollouts} == {"quick"}
    assert {rollout.stop for rollout in rollouts} == {StopReason.DONE}
    assert json.loads((place / "runs/a/metrics.json").read_text())["rollouts/ended"] >= 2
    assert (place / "runs/a/tape/tape.jsonl").read_text().count("kept") >= 2


def test_tools_can_be_those_of_a_remote_gateway(place: Path, model: Path) -> None:
    says = {"t": [render_calls(("add", {"a": 3, "b": 4}), ("write_note", {"text": "x"})), "done"]}
    (place / "says.json").write_text(json.dumps(says))
    words = ("--model", str(model), "--data", rows(place, "t"), "--out", "runs/a", "--n", "2")
    with live_server(lambda: Gateway.load(ROOT / "tool_configs", ROOT / "mcp_servers.json")) as at:
        with run_process(place, str(SCRIPTED), "says.json", "rollout", "--tools", at.url, *words) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output
        assert not at.gateway.sessions
    rollouts = list(Rollouts(place / "runs/a"))
    assert [rollout.stop for rollout in rollouts] == [StopReason.DONE] * 2
    assert "Note 1 is written." in str(rollouts[0].ledger.messages)
