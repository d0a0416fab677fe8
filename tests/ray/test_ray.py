"""Ranks and servers on a real Ray, in a network namespace with loopback alone: `make test-ray`.

Most of it has stand-ins; at last, two real ranks train a small job, whose rollouts two real workers play.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.train.trainings import write_config
from trainer.policy.shards import has_shards
from trainer.storage.run_files import read_metrics

ROOT = Path(__file__).parents[2]
BIN = Path(os.environ.get("MTRL_RAY_ENVIRONMENT", ROOT / ".ray")) / "bin"
INSIDE = """
ip link set lo up
ray start --head --port 6399 --num-cpus 4 --include-dashboard=false --disable-usage-stats --temp-dir "$1" >&2 || exit 1
trap 'ray stop --force >&2' EXIT
timeout 200 python tests/ray/ray_job.py "$2" || exit 1
cd "$2/trained"
timeout 200 python -m trainer.cli --ray auto --config run.yaml --ranks 2 --out runs/a
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the job in the namespace shows of itself."""
    if not BIN.is_dir():
        pytest.skip(f"there is no Ray in {BIN}: make ray")
    folder, sessions = tmp_path_factory.mktemp("ray"), Path(f"/tmp/mtrl-ray-{os.getpid()}")  # sockets need short paths
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    (folder / "trained").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "trained")
        write_config(engine="torch", steps=1, rollout={"workers": 2})
    packages = sysconfig.get_path("purelib")  # Ray's Python has no torch: the ranks use that of the tests.
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{packages}"}
    environment["OMP_NUM_THREADS"] = "1"
    environment.pop("MTRL_SGLANG_PYTHON", None)
    command = [*unshare, "bash", "-c", INSIDE, "bash", str(sessions), str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    shutil.rmtree(sessions, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = folder / "trained/runs"
    shown: dict[str, Any] = {
        "metrics": read_metrics(trained / "a/metrics.jsonl"),
        "logs": {log.name: log.read_text() for log in (trained / "a/logs").iterdir()},
        "has shards": has_shards(trained / "a/checkpoints/000001"),
    }
    for line in (folder / "shown.jsonl").read_text().splitlines():
        shown |= json.loads(line)
    return shown


def test_ranks_get_the_variables_of_torchrun_and_the_servers_address(shown: dict[str, Any]) -> None:
    for rank, starts in enumerate(shown["starts"]):
        words, variables, _ = starts[0]
        assert words[:2] == ["--config", "it's.yaml"] and words[2] == "--engine" and "--resume" not in words
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
        assert variables["MASTER_ADDR"] == "127.0.0.1" and variables["EXTRA"] == "a b"


def test_all_ranks_start_again_and_resume_when_one_fails_or_its_actor_is_killed(shown: dict[str, Any]) -> None:
    assert shown["failed rank"] == shown["killed actor"] == 0
    assert all(starts[1][0][-1] == "--resume" for starts in shown["starts"])
    assert shown["left"] == [], "no process outlives its actor"
    notes = " ".join(shown["notes"])
    assert "ended with code 7 and start again (1 retries left)" in notes and "a rank was lost" in notes


def test_failing_rank_is_tried_again_but_not_one_that_cannot_start_with_its_settings(shown: dict[str, Any]) -> None:
    assert shown["code 2"] == 2 and shown["code 3"] == 3, "the exit code is the job's"
    notes = "\n".join(shown["notes"])
    assert notes.count("rank 0 ended with code 2:\n  why 2") == 1
    assert notes.count("rank 0 ended with code 3:") == 2 and "code 3, and no retries are left" in notes


def test_rank_0_says_whether_the_failure_of_another_rank_would_happen_again(shown: dict[str, Any]) -> None:
    assert shown["leader knows"] == 2, shown["leader's notes"]
    assert "rank 0 ended with code 2" in shown["leader's notes"][-1], "nothing starts again"
    assert shown["lost leader"] == 1, "a rank 0 that is gone says nothing, so the ranks start again"


def test_job_that_has_no_room_is_refused_with_what_the_cluster_has(shown: dict[str, Any]) -> None:
    assert (
        "it asks for 0 GPU, 50 CPU; the cluster has 0 GPU, 4 CPU" in shown["no room"] and "remedy" in shown["no room"]
    )
    assert shown["free"] == 4.0, "nothing stays reserved"


def test_ranks_on_ray_train_a_job_together(shown: dict[str, Any]) -> None:
    (step,) = shown["metrics"]
    assert step["step"] == 1 and step["distributed/imbalance"] >= 1.0 and "update/grad_norm" in step
    assert {name for name in step if name.startswith("distributed/tokens_per_s/")} == {
        f"distributed/tokens_per_s/rank_{rank}" for rank in range(2)
    }
    assert step["workers/alive"] == 2 and "2 of 2 up" in shown["logs"]["rank-0.log"]
    logs = {f"{role}-{index}.log" for role in ("rank", "worker") for index in range(2)}
    assert shown["has shards"] and logs == shown["logs"].keys(), "one folder of the run for all"
    assert all("Traceback" not in log for log in shown["logs"].values())
