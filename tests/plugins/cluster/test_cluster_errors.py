"""What `mtrl-train render` refuses, with a remedy, before it writes anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.plugins.cluster.jobs import write_job
from tests.trainer.cli_data import RunCommand


class Healthy(BaseHTTPRequestHandler):
    """Answers as an SGLang server that is up."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        return


@contextmanager
def healthy_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(timeout=60)


BASE = ("--config", "run.yaml", "--nodes", 4)
K8S = ("kubernetes", *BASE, "--image", "mtrl:1")


@pytest.mark.parametrize(
    ("words", "settings", "problem", "remedy"),
    [
        (
            ("slurm", *BASE),
            {"serving": {"options": ["--tp", "3"]}},
            "do not divide the 8 GPUs",
            "--tp to one of 1, 2, 4, 8",
        ),
        (("slurm", *BASE), {"prompts": 2, "n": 4}, "16 ranks share 8 rollouts", "`prompts: 4` or more"),
        (("slurm", *BASE, "--server-nodes", 4), {}, "none would train", "more --nodes"),
        (("slurm", *BASE, "--server-nodes", 1), {"engine": "torch"}, "engine is torch", "engine: sglang"),
        (
            ("slurm", *BASE, "--server-nodes", 1),
            {"model": "demo", "data": "demo"},
            "no folder of the model",
            "model's folder",
        ),
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
)
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
    run: RunCommand, free_tcp_port: int
) -> None:
    with healthy_server() as url:
        run("wait-for-servers", url)
        output = run("wait-for-servers", "--within", 0.3, url, f"http://127.0.0.1:{free_tcp_port}", code=2).output
    assert f"no answer within 0.3 s from http://127.0.0.1:{free_tcp_port}" in output and url not in output
    assert "is no address of a server" in run("wait-for-servers", "host:1", code=2).output
