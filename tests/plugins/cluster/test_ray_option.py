"""`mtrl-train --ray`: the variables of ranks, the job made of settings, what is refused. `tests/ray` runs the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mtrl_plugins.cluster.ray_job import _make_job
from mtrl_plugins.cluster.ray_launcher import rank_environments
from tests.plugins.cluster.jobs import write_job
from tests.trainer.cli_data import RunCommand
from trainer.cli.options import TrainOptions
from trainer.cli.run_file import load_settings
from trainer.train.settings import TrainSettings

LONG_S = 60.0
ACTOR = """
import time
from mtrl_plugins.cluster.node_process import NodeProcess
keeper = NodeProcess()  # Its process ends with it.
print(keeper.start(["sleep", "1000"], {}, ".", "log"), flush=True)
time.sleep(1000)
"""


def test_ranks_of_a_node_see_all_its_gpus_and_know_their_place() -> None:
    places = [("10.0.0.1", ("2",)), ("10.0.0.1", ("5",)), ("10.0.0.2", ("0",))]
    environments = rank_environments(places, 4711)
    assert [each["RANK"] for each in environments] == ["0", "1", "2"]
    assert [each["LOCAL_RANK"] for each in environments] == ["0", "1", "0"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["2,5", "2,5", "0"]
    assert {each["MASTER_ADDR"] for each in environments} == {"10.0.0.1"} and environments[0]["MASTER_PORT"] == "4711"


def test_job_takes_the_gpus_that_servers_leave(place: Path) -> None:
    serving = {"replicas": 3, "options": ["--tp", "2"]}
    settings = load_settings(TrainSettings, write_job(place, serving=serving), {})
    given = {"config": "run.yaml", "seed": 3, "mode": None, "out": None}
    options = TrainOptions(given, ranks=None, resume=False, others={})
    job = _make_job(settings, place / "runs/a", options, {"GPU": 16.0, "CPU": 64.0})
    assert (job.ranks, job.servers, job.server_gpus, job.gpus) == (10, 3, 2, True)
    assert job.logs == place / "runs/a/logs"
    assert job.command[3:] == ("--config", "run.yaml", "--seed", "3", "--out", str(place / "runs/a"))
    assert job.server_arguments[:2] == ("--model-path", str(place / "models/m"))
    assert not job.resumes(False) and not job.resumes(True)
    (place / "runs/a").mkdir(parents=True)
    (place / "runs/a/run.json").write_text("{}")
    assert job.resumes(True) and not job.resumes(False), "only what this job began is resumed by itself"


@pytest.mark.parametrize(
    ("words", "problem", "remedy"),
    [
        (("--config", "run.yaml", "--ray-servers", 2), "needs a Ray cluster", "add --ray ADDRESS"),
        (("--model", "models/m", "--data", "tasks.jsonl", "--ray", "auto"), "needs a run file", "--config"),
        (("--config", "run.yaml", "--ray", "auto"), "Ray is not installed here", "pip install 'mtrl-rl[ray]'"),
    ],
)
def test_mistakes_with_ray_are_refused_with_a_remedy(
    run: RunCommand, place: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], problem: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write_job(place)
    output = run(*words, code=2).output
    assert problem in output and remedy in output


def test_process_ends_with_its_actor_although_ray_kills_the_actors_process_group(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ACTOR], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as actor:
        assert actor.stdout is not None
        process = psutil.Process(int(actor.stdout.readline()))
        os.killpg(actor.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([process], timeout=LONG_S)
    assert not alive
