"""`mtrl-train render kubernetes`: manifests that fit the schemas, and start scripts that start ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.sandbox.sandbox_settings import SandboxSettings
from mtrl_plugins.cluster import kubernetes
from tests.plugins.cluster.jobs import HOSTILE, read_lines, write_job, write_program
from tests.plugins.cluster.manifests import read_manifests, validate
from tests.trainer.cli_data import RunCommand

KINDS = [
    *("ConfigMap/run-files", "Job/run", "PersistentVolumeClaim/run-workspace"),
    *("Service/run-ranks", "Service/run-servers", "StatefulSet/run-servers"),
]
TRAINER = """
import json, os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
if sys.argv[1] == "wait-for-sandboxes":
    os.write(1, f"waits {sys.argv[3]}\\n".encode())
    while not os.path.exists("answers"):
        time.sleep(0.01)
    sys.exit(int(os.environ["SANDBOXES_CODE"]))
run = sys.argv[sys.argv.index("--out") + 1]
does = "resumes" if "--resume" in sys.argv else "starts"
os.write(1, f"rank {os.environ['RANK']} {does}\\n".encode())  # At once: lines of the pod's ranks stay whole.
with open(run + "-" + os.environ["RANK"] + ".jsonl", "a") as log:
    log.write(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]) + "\\n")
if "--resume" in sys.argv:
    sys.exit(0)
if os.environ["RANK"] != "0":
    time.sleep(100)  # as in a collective with a rank that is gone
ends = time.monotonic() + 60
others = [f"{run}-{rank}.jsonl" for rank in range(1, int(os.environ["WORLD_SIZE"]))]
while not all(map(os.path.exists, others)) and time.monotonic() < ends:
    time.sleep(0.01)  # as at the first collective
if "ENDS_ALIKE" in os.environ:
    open(os.environ["MTRL_EXIT_CODE_FILE"], "w").write("2\\n")
    sys.exit(2)
os.makedirs(run)
open(os.path.join(run, "run.json"), "w").close()
sys.exit(1)
"""


def render(run: RunCommand, *words: object) -> dict[str, dict[str, Any]]:
    base = ("--image", "registry/mtrl:1", "--nodes", 4, "--out", "kubernetes")
    run("render", "kubernetes", "--config", "run.yaml", *base, *words)
    return read_manifests(Path("kubernetes"))


def test_manifests_fit_the_schemas_with_all_options(run: RunCommand, place: Path) -> None:
    write_job(place)
    options = ("--namespace", "team", "--storage-class", "nfs", "--secret", "tokens", "--time", "1-00:00:00")
    manifests = render(run, *options, "--cpus", "64", "--memory", "400Gi", "--env", "A=b")
    assert sorted(manifests) == KINDS
    for manifest in manifests.values():
        validate(manifest)
    for file in Path("kubernetes").glob("*.yaml"):
        assert file.read_text().startswith("# "), "each file says what it is"
    assert "kubectl apply -f ." in (Path("kubernetes") / "README.md").read_text()


def test_manifests_fit_the_schemas_with_few_options_on_cpus(run: RunCommand, place: Path) -> None:
    write_job(place, engine="torch")
    manifests = render(run, "--gpus-per-node", 0, "--claim", "existing")
    assert "StatefulSet/run-servers" not in manifests and "PersistentVolumeClaim/run-workspace" not in manifests
    for manifest in manifests.values():
        validate(manifest)


def test_job_pods_and_servers_have_the_addresses_that_ranks_are_given(run: RunCommand, place: Path) -> None:
    write_job(place)
    manifests = render(run)
    job, servers = manifests["Job/run"]["spec"], manifests["StatefulSet/run-servers"]["spec"]
    pod = job["template"]["spec"]
    values = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
    assert servers["replicas"] == 8 and job["completions"] == job["parallelism"] == 2
    server = servers["template"]["spec"]["containers"][0]
    logs = values["MTRL_LOGS"]
    assert logs == "/workspace/runs/run/logs" and f"`{logs}`" in Path("kubernetes/README.md").read_text()
    assert server["command"] == ["sh", "/etc/mtrl/log.sh", f"{logs}/sglang-$(POD_INDEX).log"]
    assert "POD_INDEX" in {item["name"] for item in server["env"]}
    names = [f"http://run-servers-{index}.{servers['serviceName']}:30000" for index in range(8)]
    assert values["MTRL_ENGINE"].split(",") == names and values["MTRL_NODES"] == "2"
    assert values["MTRL_RENDEZVOUS"] == f"run-0.{pod['subdomain']}:29500"
    for service, labels in (("ranks", job["template"]), ("servers", servers["template"])):
        selector = manifests[f"Service/run-{service}"]["spec"]["selector"]
        assert selector.items() <= labels["metadata"]["labels"].items(), "the Service finds its pods"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert servers["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def expand(text: str) -> str:
    """What a container gets for an argument or a value, as Kubernetes documents it."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda match: "$" if match[0] == "$$" else f"<the variable {match[1]}>", text)


def test_hostile_values_stay_values_in_manifests(run: RunCommand, place: Path) -> None:
    write_job(place, serving={"options": ["--tp", "2", *HOSTILE]})
    nasty = "$(POD_IP)\n- name: INJECTED\n  value: 'x'"
    manifests = render(run, "--env", f"NASTY={nasty}")
    server = manifests["StatefulSet/run-servers"]["spec"]["template"]["spec"]["containers"][0]
    assert [expand(word) for word in server["args"][-len(HOSTILE) - 2 : -2]] == [*HOSTILE]
    assert server["env"][0]["name"] == "NASTY" and expand(server["env"][0]["value"]) == nasty
    assert manifests["ConfigMap/run-files"]["data"]["run.yaml"] == (place / "run.yaml").read_text()


def test_text_that_another_yaml_reader_takes_for_a_number_is_quoted() -> None:
    text = kubernetes.to_yaml([], {"values": ["1e3", "y", ".5", "0o7", "+1", "plain"]})
    assert text == "values:\n- '1e3'\n- 'y'\n- '.5'\n- '0o7'\n- '+1'\n- plain\n"


def test_pods_start_all_ranks_with_torchrun_and_resume_when_one_fails(
    run: RunCommand, place: Path, free_tcp_port: int
) -> None:
    write_job(place, engine="torch")
    manifests = render(run, "--gpus-per-node", 2, "--nodes", 2)
    running = [start_pod(manifests, place, free_tcp_port, NODE_RANK=str(index)) for index in range(2)]
    try:
        printed = [pod.communicate(timeout=120)[0] for pod in running]
        assert [pod.returncode for pod in running] == [0, 0]
    finally:
        for pod in running:
            pod.kill()
    starts = [read_lines(place / f"ranks-{rank}.jsonl") for rank in range(4)]
    assert [{line[1]["WORLD_SIZE"] for line in lines} for lines in starts] == [{"4"}] * 4
    assert all(lines[-1][0][-1] == "--resume" for lines in starts), "all ranks start again, and resume"
    for rank in range(4):
        assert (place / f"logs/rank-{rank}.log").read_text() == f"rank {rank} starts\nrank {rank} resumes\n"
        assert f"rank {rank} resumes\n" in "".join(printed), "kubectl logs has it, too"


def test_servers_of_sandboxes_are_behind_one_name_with_a_token_that_ranks_have(run: RunCommand, place: Path) -> None:
    write_job(place)
    manifests = render(run, "--sandboxes", 3)
    for manifest in manifests.values():
        validate(manifest)
    servers, service = manifests["Deployment/run-sandboxes"]["spec"], manifests["Service/run-sandboxes"]["spec"]
    assert servers["replicas"] == 3 and service["clusterIP"] == "None" and not service["publishNotReadyAddresses"]
    assert service["selector"].items() <= servers["template"]["metadata"]["labels"].items()
    pod = servers["template"]["spec"]
    (volume,), (container,) = pod["volumes"], pod["containers"]
    assert volume["secret"]["secretName"] == "run-sandboxes", "no volume of the run's"
    env = {item["name"]: item for item in manifests["Job/run"]["spec"]["template"]["spec"]["containers"][0]["env"]}
    port = container["ports"][0]["containerPort"]
    assert env["MTRL_SANDBOXES"]["value"] == f"http://run-sandboxes:{port}" and str(port) in container["command"]
    source = {"secretKeyRef": {"name": "run-sandboxes", "key": "token"}}
    assert env["MTRL_SANDBOX_TOKEN"]["valueFrom"] == source
    assert (Path("kubernetes") / "3-sandboxes.yaml").stat().st_mode & 0o077 == 0
    token = manifests["Secret/run-sandboxes"]["stringData"]["token"]
    mark = servers["template"]["metadata"]["annotations"]
    again = render(run, "--sandboxes", 2)
    assert again["Secret/run-sandboxes"]["stringData"]["token"] == token
    assert again["Deployment/run-sandboxes"]["spec"]["template"]["metadata"]["annotations"] == mark
    Path("kubernetes").rename("earlier")
    other = render(run, "--sandboxes", 2)["Deployment/run-sandboxes"]["spec"]["template"]["metadata"]["annotations"]
    assert token not in str(mark) and other != mark, "servers start again, with the new token"
    settings = {"url": env["MTRL_SANDBOXES"]["value"], "token": token}
    SandboxSettings.model_validate({"remote": settings})


def start_pod(manifests: dict[str, dict[str, Any]], place: Path, port: int, **more: str) -> subprocess.Popen[str]:
    """The container of the Job's pod, with the trainer's stand-in."""
    env = manifests["Job/run"]["spec"]["template"]["spec"]["containers"][0]["env"]
    values = {item["name"]: item["value"] for item in env if "value" in item}
    for name, text in manifests["ConfigMap/run-files"]["data"].items():
        (place / name).write_text(text)
    write_program(place / "programs", "mtrl-train", TRAINER)
    here = {
        "MTRL_FILES": str(place),
        "MTRL_RUN": str(place / "ranks"),
        "MTRL_LOGS": str(place / "logs"),
        "MTRL_RENDEZVOUS": f"localhost:{port}",
        "POD_IP": "localhost",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{place / 'programs'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment = {**os.environ, **values, **here, **more}
    return subprocess.Popen(["sh", place / "start.sh"], env=environment, stdout=subprocess.PIPE, text=True)


def test_pod_whose_rank_0_would_end_alike_ends_the_job_and_starts_no_rank_again(
    run: RunCommand, place: Path, free_tcp_port: int
) -> None:
    write_job(place, engine="torch")
    manifests = render(run, "--gpus-per-node", 2, "--nodes", 1, "--retries", 3)
    pod = start_pod(manifests, place, free_tcp_port, NODE_RANK="0", ENDS_ALIKE="1")
    try:
        pod.communicate(timeout=120)
    finally:
        pod.kill()
    assert pod.returncode == 2 and len(read_lines(place / "ranks-0.jsonl")) == 1
    _, rule = manifests["Job/run"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and 2 in rule["onExitCodes"]["values"]


@pytest.mark.parametrize("code", [0, 1])
def test_pod_starts_its_ranks_once_a_server_of_sandboxes_answers_and_none_where_none_does(
    code: int, run: RunCommand, place: Path, free_tcp_port: int
) -> None:
    write_job(place, engine="torch")
    manifests = render(run, "--gpus-per-node", 1, "--nodes", 1, "--sandboxes", 2)
    pod = start_pod(manifests, place, free_tcp_port, NODE_RANK="0", SANDBOXES_CODE=str(code), ENDS_ALIKE="1")
    try:
        assert pod.stdout is not None and pod.stdout.readline() == "waits 1800\n"
        (place / "answers").touch()
        pod.communicate(timeout=120)
    finally:
        pod.kill()
    assert pod.returncode == (1 if code else 2), "with 1 the pod is started again"
    assert (place / "ranks-0.jsonl").exists() is (code == 0)


def test_pod_that_is_ended_while_it_waits_for_sandboxes_ends_at_once(
    run: RunCommand, place: Path, free_tcp_port: int
) -> None:
    write_job(place, engine="torch")
    manifests = render(run, "--gpus-per-node", 1, "--nodes", 1, "--sandboxes", 2)
    pod = start_pod(manifests, place, free_tcp_port, NODE_RANK="0", SANDBOXES_CODE="0")
    try:
        assert pod.stdout is not None and pod.stdout.readline().startswith("waits")
        pod.terminate()
        pod.communicate(timeout=60)
    finally:
        pod.kill()
        (place / "answers").touch()
    assert pod.returncode == 143 and not (place / "ranks-0.jsonl").exists()


def test_log_of_a_container_has_all_that_a_killed_command_printed(run: RunCommand, place: Path) -> None:
    write_job(place)
    log = place / "it's a/log"
    (place / "log.sh").write_text(render(run)["ConfigMap/run-files"]["data"]["log.sh"])
    command = ["sh", place / "log.sh", log, "sh", "-c", 'echo "$1" >&2; echo out; kill -9 $$', "sh", "$(no) 'word'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9 and done.stdout == log.read_text() == "$(no) 'word'\nout\n"
