"""Agents from npm and mini-swe-agent finish a task in a box, unmodified, where only loopback is reached: a row's task,
which is graded, and one of Harbor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".agents" / "npm" / "node_modules" / ".bin"
PYTHON_BIN = ROOT / ".agents" / "bin"
TIMEOUT_S = 300


def play(name: str, kind: str) -> dict[str, Any]:
    """Plays a rollout in a network namespace of its own."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    inside = 'ip link set lo up && exec "$@"'
    command = [*unshare, "sh", "-c", inside, "sh", sys.executable, "-m", "tests.agents.npm_agents", name]
    command += [str(PYTHON_BIN if name == "mini" else BIN), kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    played: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return played


@pytest.mark.parametrize(
    ("name", "kind", "branches", "calls", "changed"),
    [
        ("codex", "grade", [2], ["exec_command"], {}),
        ("codex", "harbor", [2], ["exec_command"], {}),
        ("opencode", "harbor", [1, 2], ["bash"], {"arguments": 1}),  # It asks for a title first.
        ("pi", "harbor", [2], ["bash"], {"arguments": 1}),
        ("mini", "grade", [2], ["bash", "bash"], {}),
        ("mini", "harbor", [2], ["bash", "bash"], {}),
        ("qwen", "harbor", [2], ["run_shell_command"], {"arguments": 1}),
        ("gemini", "harbor", [2], ["run_shell_command"], {"arguments": 1}),
    ],
)
def test_agent_finishes_a_task_with_exact_ids(
    name: str, kind: str, branches: list[int], calls: list[str], changed: dict[str, int]
) -> None:
    played = play(name, kind)
    assert (played["stop"], played["reason"]) == ("done", ""), played
    assert played["turns"] == branches and played["calls"] == calls
    assert played["changed"] == changed and played["retokenised"] == 0
    assert played["rewards"] == {kind: 1.0}
