"""torchrun on two nodes, agents on this machine's loopback, of which one is lost with its ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path

import psutil
import pytest

from tests.trainer.processes import ROOT, TIMEOUT_S, run_process, wait_until
from tests.trainer.train.trainings import write_config

STEPS = 4
FASTER = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"
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


def read_steps() -> list[dict[str, float]]:
    file = Path("runs/a/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def count_steps(*, ranks: int) -> int:
    """The updates that so many ranks have made."""
    return sum(1 + ("distributed/idle/rank_1" in step) == ranks for step in read_steps() if "loss" in step)


def test_job_goes_on_without_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_tcp_port: int) -> None:
    """That it trains as an undisturbed job does, test_ranks_job.py proves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    limits = {"checkpoint": {"every": 1}, "steps": STEPS, "distributed": {"ranks": 2, "timeout_s": 5}}
    reward = {"components": {"sevenths": {"function": f"{REWARDS}:sevenths"}}}
    write_config(engine="torch", n=3, sampling={"temperature": 2.0}, reward=reward, **limits)
    with run_process(tmp_path, *agent(free_tcp_port, is_host=True)) as first:
        with run_process(tmp_path, *agent(free_tcp_port, is_host=False)) as second:
            wait_until(lambda: count_steps(ranks=2) > 0, first)
            kill_node(second.pid)
        output, _ = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == 0, output
    steps = [step["step"] for step in read_steps()]
    assert steps == sorted({*steps}) and steps[-1] == STEPS and count_steps(ranks=1) >= 2
