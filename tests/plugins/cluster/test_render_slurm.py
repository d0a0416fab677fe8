"""`mtrl-train render slurm`: options that sbatch knows, values that stay values, and what the script does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from shlex import split

import pytest
import typer

from gateway.sandbox.sandbox_settings import SandboxSettings
from tests.plugins.cluster.jobs import HOSTILE, read_lines, write_job, write_program
from tests.trainer.cli_data import RunCommand
from tests.waiting import wait_until
from trainer.cli.rank_command import keep_exit_code
from trainer.distributed.rank_environment import FILE_VARIABLE

SBATCH_OPTIONS = {
    "account", "array", "begin", "chdir", "comment", "constraint", "container", "cores-per-socket", "cpus-per-gpu",
    "cpus-per-task", "deadline", "dependency", "error", "exclude", "exclusive", "export", "gpu-bind", "gpus",
    "gpus-per-node", "gpus-per-task", "gres", "hint", "hold", "job-name", "kill-on-invalid-dep", "licenses",
    "mail-type", "mail-user", "mem", "mem-per-cpu", "mem-per-gpu", "network", "nice", "no-kill", "no-requeue",
    "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "overcommit", "partition",
    "priority", "qos", "reboot", "requeue", "reservation", "signal", "switches", "time", "time-min", "tmp",
    "wait-all-nodes", "wckey",
}  # fmt: skip
"""Those of sbatch's manual that a job may use."""
WITHOUT_VALUE = {"exclusive", "requeue", "no-requeue", "hold", "no-kill", "overcommit", "reboot"}
SRUN = """
import json, os, signal, subprocess, sys
options = [word for word in sys.argv[1 : sys.argv.index("bash")]]
command = sys.argv[sys.argv.index("bash") :]
value = {word.partition("=")[0]: word.partition("=")[2] for word in options}
value["gpus"] = os.environ.get("SLURM_GPUS_PER_NODE")
with open("steps.jsonl", "a") as log:
    log.write(json.dumps(value) + "\\n")
rank = os.environ.get("STARTED_RANK", "1")
environment = {**os.environ, "SLURM_PROCID": rank, "SLURM_NTASKS": value["--ntasks"]}
environment["SLURM_LOCALID"] = str(int(rank) % 8)
child = subprocess.Popen(command, env=environment)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: child.send_signal(number))
sys.exit(child.wait())
"""
SERVER = """
import json, os, time
with open("servers.jsonl", "a") as log:
    log.write(json.dumps("MTRL_WORKER_TOKEN" in os.environ or "MTRL_SANDBOX_TOKEN" in os.environ) + "\\n")
time.sleep(100)
"""
SANDBOXES = """
import json, os, sys
file = sys.argv[sys.argv.index("--token-file") + 1]
told = [sys.argv[1:], open(file).read().strip(), "MTRL_SANDBOX_TOKEN" in os.environ, oct(os.stat(file).st_mode & 0o777)]
with open("sandboxes.jsonl", "a") as log:
    log.write(json.dumps(told) + "\\n")
"""
TRAINER = """
import json, os, signal, sys, time
if sys.argv[1] == "wait-for-servers":
    while "SERVERS_CODE" not in os.environ and not os.path.exists("servers.jsonl"):
        time.sleep(0.01)
    sys.exit(int(os.environ.get("SERVERS_CODE", "0")))
if sys.argv[1] == "wait-for-sandboxes":
    while not os.path.exists("sandboxes.jsonl"):
        time.sleep(0.01)
    sys.exit(int(os.environ.get("SANDBOXES_CODE", "0")))
if os.environ["RANK"] != "0" and "MTRL_WORKER_TOKEN" in os.environ:
    sys.exit(9)
if "MTRL_SANDBOXES" in os.environ:
    with open("rank-sandboxes.jsonl", "a") as log:
        log.write(json.dumps([os.environ["MTRL_SANDBOXES"], os.environ["MTRL_SANDBOX_TOKEN"]]) + "\\n")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
with open("ranks.jsonl", "a") as log:
    log.write(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]) + "\\n")
if "RANK_0_CODE" in os.environ:
    open(os.environ["MTRL_EXIT_CODE_FILE"], "w").write(os.environ["RANK_0_CODE"])
if os.environ.get("HANGS"):
    time.sleep(100)
sys.exit(int(os.environ.get("TRAINER_CODE", "0")))
"""


def render(run: RunCommand, *words: object, code: int = 0) -> str:
    base = ("render", "slurm", "--config", "run.yaml", "--nodes", 4, "--gpus-per-node", 8, "--out", "slurm")
    return run(*base, *words, code=code).output


def directives(script: str) -> dict[str, str]:
    """The options of a script as sbatch reads them: up to the first command."""
    head = script[: next(found.start() for found in re.finditer(r"^[^#\n]", script, re.M))]
    words = [word for line in head.splitlines() if line.startswith("#SBATCH ") for word in split(line[8:])]
    assert script.count("#SBATCH ") == len(words), "one option a line, none of them after a command"
    values = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        assert word.startswith("--") and name in SBATCH_OPTIONS, f"sbatch has no option {word}"
        assert bool(equals) == (name not in WITHOUT_VALUE), f"{word} has a value too many or too few"
        values[name] = value
    return values


def test_script_has_options_that_sbatch_knows_and_passes_bash(run: RunCommand, place: Path) -> None:
    write_job(place)
    output = render(
        run, "--time", "08:00:00", "--partition", "gpu", "--sbatch", "qos=high", "--sbatch", "mail-user=a b"
    )
    assert "16 trainer ranks on 2 of 4 nodes" in output and "SGLang servers: 8 on 2 nodes, 2 GPUs each" in output
    values = directives((place / "slurm/job.sbatch").read_text())
    assert values["nodes"] == "4" and values["gpus-per-node"] == "8" and values["time"] == "08:00:00"
    assert values["signal"] == "B:USR1@300" and "requeue" in values and values["open-mode"] == "append"
    assert values["partition"] == "gpu" and values["qos"] == "high" and values["mail-user"] == "a b"
    assert Path(values["output"]).parent.is_dir(), "sbatch makes no folders"
    subprocess.run(["bash", "-n", place / "slurm/job.sbatch"], check=True, timeout=60)


def test_hostile_values_of_a_run_file_and_of_options_stay_values(
    run: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "it's 100% $(touch HACKED)"
    place.mkdir()
    monkeypatch.chdir(place)
    write_job(place, serving={"options": ["--tp", "2", *HOSTILE]}, out="runs/$(touch HACKED) 'x'")
    render(run, *(word for value in HOSTILE for word in ("--env", f"NASTY={value}")))
    script = (place / "slurm/job.sbatch").read_text()
    assert directives(script)["chdir"] == str(place)
    variables = script[: script.index("# From here on")]
    show = """printf '%s\\0' "${train[@]}" -- "${server[@]}" -- "$NASTY" "$run" """
    done = subprocess.run(["bash", "-c", variables + show], capture_output=True, text=True, timeout=60, check=True)
    train, server, rest = (part.strip("\0").split("\0") for part in done.stdout.split("--\0"))
    folder = f"{place}/runs/$(touch HACKED) 'x'"
    assert train == ["mtrl-train", "--config", str(place / "run.yaml"), "--out", folder]
    assert tuple(server[-len(HOSTILE) :]) == HOSTILE and rest == [HOSTILE[-1], folder]
    assert not list(tmp_path.rglob("HACKED"))


@pytest.fixture
def programs(place: Path) -> Path:
    """Stand-ins for Slurm's commands and the trainer, and a setup file that puts them first."""
    folder = place / "programs"
    write_program(folder, "srun", SRUN)
    write_program(folder, "mtrl-train", TRAINER)
    write_program(folder, "sglang-python", SERVER)
    write_program(folder, "scontrol", "import sys\n" + (
        "if sys.argv[1] == 'show': print('n1\\nn2\\nn3\\nn4')\n"
        "else:\n    open('requeued', 'a').write(sys.argv[2] + ' ')\n    import os, signal\n"
        "    os.killpg(0, signal.SIGKILL)\n"
    ))  # fmt: skip
    setup = f"export PATH={folder}:$PATH MTRL_SGLANG_PYTHON={folder}/sglang-python\n"
    (place / "setup.sh").write_text(setup)
    return folder


def start(place: Path, **environment: str) -> subprocess.Popen[bytes]:
    """The rendered script as Slurm starts it: in a process group of its own."""
    values = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CPUS_ON_NODE": "64", **environment}
    command = ["bash", place / "slurm/job.sbatch"]
    return subprocess.Popen(command, env={**os.environ, **values}, start_new_session=True, stderr=subprocess.DEVNULL)


def end(script: subprocess.Popen[bytes]) -> int:
    """The script's exit code; nothing that it started stays."""
    try:
        return script.wait(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def test_script_starts_servers_then_ranks_and_resumes_a_run_that_has_begun(
    run: RunCommand, place: Path, programs: Path
) -> None:
    write_job(place)
    render(run, "--setup", "setup.sh")
    assert end(start(place)) == 0
    servers, ranks = read_lines(place / "steps.jsonl")
    assert servers["--nodelist"] == "n3,n4" and servers["--ntasks"] == "8" and servers["--cpus-per-task"] == "16"
    assert ranks["--nodelist"] == "n1,n2" and ranks["--ntasks"] == "16" and ranks["--gpus-per-node"] == "8"
    [[words, variables]] = read_lines(place / "ranks.jsonl")
    urls = [f"http://{host}:{port}" for host in ("n3", "n4") for port in range(30000, 30004)]
    logs = f"{place}/runs/run/logs"
    assert servers["--output"] == f"{logs}/sglang-%t.log" and ranks["--output"] == f"{logs}/rank-%t.log"
    assert Path(logs).is_dir(), "srun makes no folders"
    assert f"# Logs:    {logs}:" in (place / "slurm/job.sbatch").read_text()
    assert words[-2:] == ["--engine", ",".join(urls)] and "--resume" not in words
    expected = {"RANK": "1", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert variables == {**expected, "MASTER_ADDR": "n1", "MASTER_PORT": "29507"}
    (place / "runs/run/run.json").write_text("{}")
    assert end(start(place)) == 0
    assert read_lines(place / "ranks.jsonl")[-1][0][-1] == "--resume"


def test_servers_of_sandboxes_run_on_the_last_nodes_and_ranks_get_their_addresses_and_token(
    run: RunCommand, place: Path, programs: Path
) -> None:
    write_job(place)
    write_program(programs, "mtrl-gateway", SANDBOXES)
    assert "servers of sandboxes: 3" in render(run, "--setup", "setup.sh", "--sandboxes", 3)
    assert end(start(place, SLURM_GPUS_PER_NODE="8")) == 0
    (step,) = (step for step in read_lines(place / "steps.jsonl") if "--overlap" in step)
    assert step["gpus"] is None, "Slurm 22.05 refuses a step that has this beside `--gres=none`"
    assert step["--nodelist"] == "n2,n3,n4" and step["--nodes"] == step["--ntasks"] == "3"
    assert step["--cpus-per-task"] == "64" and step["--gres"] == "none", "ranks and engines keep the GPUs"
    assert step["--output"] == f"{place}/runs/run/logs/sandboxes-%t.log"
    (words, token, has_variable, mode), *_ = read_lines(place / "sandboxes.jsonl")
    assert words[:5] == ["sandboxes", "--host", "0.0.0.0", "--port", "27507"] and not has_variable and mode == "0o600"
    ((urls, token_of_rank),) = read_lines(place / "rank-sandboxes.jsonl")
    assert urls == "http://n2:27507,http://n3:27507,http://n4:27507" and token_of_rank == token and len(token) == 48
    SandboxSettings.model_validate({"remote": {"url": urls, "token": token}})
    (place / "rank-sandboxes.jsonl").unlink()
    assert end(start(place, SANDBOXES_CODE="2")) == -signal.SIGKILL and (place / "requeued").exists()
    assert not (place / "rank-sandboxes.jsonl").exists(), "no rank begins without them"
    assert not any(read_lines(place / "servers.jsonl"))


def test_failed_job_goes_back_into_the_queue_as_often_as_retries_say(
    run: RunCommand, place: Path, programs: Path
) -> None:
    write_job(place, engine="torch")
    render(run, "--setup", "setup.sh", "--retries", 1)
    assert end(start(place, TRAINER_CODE="3")) == -signal.SIGKILL
    assert (place / "requeued").read_text() == "7 "
    assert end(start(place, TRAINER_CODE="3")) == 1
    assert (place / "requeued").read_text() == "7 ", "the second failure ends the job"


def test_servers_that_do_not_start_are_a_failure_and_no_rank_starts(
    run: RunCommand, place: Path, programs: Path
) -> None:
    write_job(place)
    render(run, "--setup", "setup.sh", "--retries", 0)
    assert end(start(place, SERVERS_CODE="2")) == 1
    assert not (place / "ranks.jsonl").exists()


def test_job_that_cannot_start_with_its_settings_is_not_tried_again(
    run: RunCommand, place: Path, programs: Path
) -> None:
    write_job(place, engine="torch")
    render(run, "--setup", "setup.sh")
    assert end(start(place, TRAINER_CODE="2")) == 2
    assert end(start(place, TRAINER_CODE="143", RANK_0_CODE="2")) == 2, "srun returns the code of a rank that it killed"
    assert not (place / "requeued").exists()
    assert end(start(place, TRAINER_CODE="143", RANK_0_CODE="1")) == -signal.SIGKILL
    assert end(start(place, TRAINER_CODE="143")) == -signal.SIGKILL, "an earlier start's code does not count"
    assert (place / "requeued").read_text() == "7 7 "


def test_rank_0_alone_tells_the_script_its_exit_code(
    run: RunCommand, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "rank-0.code"
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(typer.Exit), keep_exit_code():
        raise typer.Exit(2)
    assert not file.exists()
    monkeypatch.delenv("RANK")
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    run("--config", "missing.yaml", code=2)
    assert file.read_text() == "2\n" and FILE_VARIABLE not in os.environ


async def test_signal_before_the_time_limit_stops_the_trainer_and_requeues_without_counting_a_failure(
    run: RunCommand, place: Path, programs: Path
) -> None:
    write_job(place, engine="torch")
    render(run, "--setup", "setup.sh", "--retries", 0)
    script = start(place, HANGS="1")
    await wait_until(lambda: bool(read_lines(place / "ranks.jsonl")))
    script.send_signal(signal.SIGUSR1)
    assert end(script) == -signal.SIGKILL, "the stand-in for scontrol ends the job as Slurm does"
    assert (place / "requeued").read_text() == "7 " and not (place / "slurm/logs/7/failures").exists()


def test_job_on_cpus_asks_for_no_gpus(run: RunCommand, place: Path) -> None:
    write_job(place, engine="torch")
    run("render", "slurm", "--config", "run.yaml", "--nodes", 2, "--gpus-per-node", 0)
    script = (place / "slurm/run/job.sbatch").read_text()
    assert "gpus-per-node" not in directives(script) and "gpu_options=()" in script
    assert f"programs={Path(sys.executable).parent}" in script
