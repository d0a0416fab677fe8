"""What `mtrl-train render` refuses, with a remedy, before it writes anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from mtrl_plugins.cluster.ray_job import _make_job
from mtrl_plugins.cluster.ray_launcher import rank_environments
from tests.plugins.cluster.jobs import write_job
from tests.trainer.cli_data import RunCommand
from trainer.cli.options import TrainOptions
from trainer.cli.run_file import load_settings
from trainer.train.settings import TrainSettings

BASE = ("--config", "run.yaml", "--nodes", 4)
K8S = ("kubernetes", *BASE, "--image", "mtrl:1")


@pytest.mark.parametrize(
    ("words", "settings", "problem", "remedy"),
    [
        (("slurm", *BASE), {"serving": {"options": ["--tp", "3"]}}, "do not divide the 8 GPUs",
         "--tp to one of 1, 2, 4, 8"),
        (("slurm", *BASE), {"prompts": 2, "n": 4}, "16 ranks share 8 rollouts", "`prompts: 4` or more"),
        (("slurm", *BASE, "--server-nodes", 4), {}, "none would train", "more --nodes"),
        (("slurm", *BASE, "--server-nodes", 1), {"engine": "torch"}, "engine is torch", "engine: sglang"),
        (("slurm", *BASE, "--server-nodes", 1), {"model": "demo", "data": "demo"}, "no folder of the model",
         "model's folder"),
        (("slurm", *BASE, "--time", "00:05:00"), {}, "no time limit of 10 minutes", "08:00:00"),
        (("slurm", *BASE, "--name", "My_Run"), {}, "no name that all schedulers take", "--name my-run"),
        (("slurm", *BASE, "--sandboxes", 5), {}, "5 servers of sandboxes do not fit 4 nodes", "one a node"),
        (("slurm", *BASE, "--env", "A B=1"), {}, "'A B' is no name of a variable", "NAME=VALUE"),
        (("slurm", *BASE, "--sbatch", "nodes=9"), {}, "nodes is set by this command", "leave it out"),
        (("slurm", *BASE, "--sbatch", "qos=a\n#SBATCH --x"), {}, "control character", "rename"),
        (("slurm", *BASE, "--setup", "none.sh"), {}, "there is no such file", "name a shell file"),
        ((*K8S, "--namespace", "My_Team"), {}, "no name in Kubernetes", "small letters"),
        ((*K8S, "--storage", "much"), {}, "no quantity", "500Gi"),
        ((*K8S, "--server-image", "$(x)"), {}, "no image", "REGISTRY/NAME:TAG"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_a_remedy(
    run: RunCommand, place: Path, words: tuple[object, ...], settings: dict[str, object], problem: str, remedy: str
) -> None:
    write_job(place, **settings)
    output = run("render", *words, "--out", "made", code=2).output
    assert problem in output and remedy in output and "Traceback" not in output
    assert not (place / "made").exists()


def test_name_of_a_run_file_is_made_valid_and_told(run: RunCommand, place: Path) -> None:
    write_job(place).rename(place / "7_Best Run.yaml")
    output = run("render", "slurm", "--config", "7_Best Run.yaml").output
    assert "the job's name is run-7-best-run, since schedulers refuse '7_Best Run'" in output
    assert (place / "slurm/run-7-best-run/job.sbatch").is_file()


def test_folder_with_other_files_is_refused_and_own_files_are_replaced(run: RunCommand, place: Path) -> None:
    write_job(place)
    run("render", *K8S, "--out", "made")
    run("render", *K8S, "--claim", "mine", "--out", "made")
    assert not (place / "made/2-volume.yaml").exists(), (
        "what an earlier rendering wrote and this one does not is removed"
    )
    (place / "made/notes.txt").write_text("mine")
    output = run("render", *K8S, "--out", "made", code=2).output
    assert "has other files: notes.txt" in output and "an empty or a new folder" in output
    assert (place / "made/notes.txt").read_text() == "mine"


def test_mark_of_a_folder_cannot_lead_to_files_elsewhere(run: RunCommand, place: Path) -> None:
    write_job(place)
    (place / "made").mkdir()
    (place / "made/.rendered-by-mtrl").write_text("../run.yaml\n..\n")
    run("render", *K8S, "--out", "made")
    assert (place / "run.yaml").is_file()


def test_waiting_for_servers_ends_when_all_answer_and_names_those_that_do_not(
    run: RunCommand, place: Path, free_tcp_port: int
) -> None:
    (place / "health").touch()
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        run("wait-for-servers", url)
        output = run("wait-for-servers", "--within", 0.3, url, f"http://127.0.0.1:{free_tcp_port}", code=2).output
        server.shutdown()
    assert f"no answer within 0.3 s from http://127.0.0.1:{free_tcp_port}" in output and url not in output
    assert "is no address of a server" in run("wait-for-servers", "host:1", code=2).output


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
