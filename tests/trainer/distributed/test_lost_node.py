"""torchrun on two nodes, agents on this machine's loopback, of which one is lost with its ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.trainer.processes import ROOT, TIMEOUT_S, run_process, wait_until
from tests.trainer.train.trainings import write_config
from trainer.cli import app

STEPS = 4
TOLERANCE = 1e-5  # Adam's first steps magnify how sums over ranks round
FASTER = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"
RUN = Path("runs/a")
REWARDS = ROOT / "tests/trainer/train/sevenths.py"
"""With a high temperature, nearly every group has a gradient by it, whatever the model writes."""


def read_command() -> list[str]:
    """The words after `torchrun` in the documentation."""
    text = (ROOT / "docs/scaling.md").read_text()
    command = re.search(r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n\$ torchrun (.*?)\n```", text, re.DOTALL)
    assert command
    return shlex.split(command[1].replace("\\\n", " "))


def agent(port: int, *, is_host: bool) -> list[str]:
    changes = {"HOST:29400": f"127.0.0.1:{port}", "8": "1"}
    words = [changes.get(word, word) for word in read_command()]
    words[words.index("--rdzv-conf") + 1] += f",is_host={int(is_host)},{FASTER}"
    return ["-m", "torch.distributed.run", "--local-addr", "127.0.0.1", "--monitor-interval", "0.2", *words]


def kill_node(pid: int) -> None:
    agent = psutil.Process(pid)
    for process in [agent, *agent.children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)


def read_steps(run: Path = RUN) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def count_steps(*, ranks: int) -> int:
    """The updates that so many ranks have made."""
    return sum(1 + ("distributed/idle/rank_1" in step) == ranks for step in read_steps() if "loss" in step)


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_tcp_port: int, one_thread: None) -> int:
    """A port of a job, in whose folder one process has made an undisturbed run."""
    monkeypatch.chdir(tmp_path)
    reward = {"components": {"sevenths": {"function": f"{REWARDS}:sevenths"}}}
    sampling = {"temperature": 2.0}
    settings = {
        "engine": "torch", "n": 3, "sampling": sampling, "checkpoint": {"every": 1}, "steps": STEPS, "reward": reward,
    }  # fmt: skip
    write_config(**settings)
    done = CliRunner().invoke(app, ["--config", "run.yaml", "--out", "undisturbed"])
    assert done.exit_code == 0, done.output
    write_config(**settings, distributed={"ranks": 2, "timeout_s": 5})
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return free_tcp_port


def lose_node(folder: Path, port: int, first: subprocess.Popen[str]) -> None:
    """Begins the job on a second node, which is lost after a step."""
    with run_process(folder, *agent(port, is_host=False)) as second:
        wait_until(lambda: count_steps(ranks=2) > 0, first)
        kill_node(second.pid)


def require_undisturbed(first: subprocess.Popen[str]) -> None:
    """Waits for the end of the job, whose steps must be those of the undisturbed run."""
    output, _ = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0, output
    assert sum("loss" in step for step in read_steps()) > STEPS / 2
    for step, same in zip(read_steps(), read_steps(Path("undisturbed")), strict=True):
        for name in {"step", "loss", "update/grad_norm", "reward/mean"} & {*step, *same}:
            assert step[name] == pytest.approx(same[name], rel=TOLERANCE, abs=TOLERANCE), (step["step"], name)


def test_job_goes_on_without_a_lost_node(tmp_path: Path, port: int) -> None:
    with run_process(tmp_path, *agent(port, is_host=True)) as first:
        lose_node(tmp_path, port, first)
        require_undisturbed(first)
    assert count_steps(ranks=1) >= 2
