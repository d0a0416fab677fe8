"""A job on two machines (network namespaces) of which a rank and a rollout worker are killed, beside one undisturbed.

`make kills-scale` kills all kinds of processes, twenty times.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.kills_scale import LOSSES, count_rollouts, run_job, summarize
from bench.kills_scale_table import ROWS, format_results

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


def make_result(**changes: object) -> dict[str, Any]:
    """What is found in a run of two steps, the second of which has no gradient."""
    found: dict[str, Any] = dict.fromkeys(ROWS, 0) | {"kills": [["worker", 1]], "starts": {"worker": 2}}
    return found | {"losses": [dict.fromkeys(LOSSES, 0.5), {"reward/mean": 1.0}]} | changes


@pytest.mark.parametrize(
    "changes",
    [
        *({"losses": [dict.fromkeys(LOSSES, 0.5) | {name: 0.501}, {"reward/mean": 1.0}]} for name in LOSSES),
        {"losses": [dict.fromkeys(LOSSES, 0.5), {"reward/mean": 1.0, "loss": 0.0}]},
        *({name: 1} for name in ("missing", "doubled", "executed_twice")),
    ],
    ids=str,
)
def test_run_whose_losses_rollouts_or_calls_differ_has_missed_its_promise(changes: dict[str, Any]) -> None:
    quiet = make_result()
    about = {"about": {}, "steps": 2}
    kept = summarize({"undisturbed": quiet, "killed": make_result()}) | about
    missed = summarize({"undisturbed": quiet, "killed": make_result(**changes)}) | about
    assert kept["kept"] and not missed["kept"]
    assert "| worker | 1 | 2 | 2 |" in format_results(kept).splitlines()
    assert "**missed**" in format_results(missed) and "**missed**" not in format_results(kept)


def test_runs_without_any_loss_prove_nothing() -> None:
    result = make_result(losses=[{"reward/mean": 1.0}])
    assert not summarize({"undisturbed": result, "killed": result})["kept"]


def test_rollout_that_is_played_again_under_another_name_counts_as_doubled() -> None:
    job = {"prompts": 1, "n": 2}
    names = [("1-0-0", 0), ("1-0-0", 1)]
    assert count_rollouts(names, 1, job) == {"rollouts": 2, "missing": 0, "doubled": 0}
    assert count_rollouts([*names, ("1-1-0", 0)], 1, job) == {"rollouts": 3, "missing": 0, "doubled": 1}
    assert count_rollouts([names[0], names[0]], 1, job) == {"rollouts": 2, "missing": 1, "doubled": 1}
