"""A job on two machines (network namespaces) of which a rank and a rollout worker are killed, beside one undisturbed.

`make kills-scale` kills all kinds of processes, twenty times.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.kills_scale import run_job, summarize

STEPS = 5


def can_make_machines() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() or not shutil.which("ip"):
        return False
    name = f"mtrl-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made


@pytest.mark.skipif(not can_make_machines(), reason="needs the right to make network namespaces")
def test_killed_rank_and_worker_of_another_machine_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kills = {"undisturbed": [], "killed": ["worker", "rank 1"]}
    results = {name: run_job(tmp_path / name, STEPS, kinds, seed=0) for name, kinds in kills.items()}
    assert [kind for kind, _ in results["killed"]["kills"]] == kills["killed"]
    summary = summarize(results)
    assert summary["kept"] and summary["losses"], results
