"""Every failure of a rank is told by name, once: before it is connected, of rank 0 itself, and under torchrun."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from mtrl_plugins.workers.handshake import TOKEN_VARIABLE
from tests.trainer.distributed.rank_pools import running_ranks
from tests.trainer.processes import TIMEOUT_S, run_process, wait_until
from tests.trainer.train.trainings import write_config
from trainer.distributed import connect_ranks as connecting
from trainer.distributed import connect_ranks as launch_ranks
from trainer.distributed.connect_ranks import AGENT_STORE, INTERFACE_VARIABLES, LocalRanks, connect_ranks
from trainer.distributed.errors import LostRankError, RankError
from trainer.distributed.follow import follow
from trainer.distributed.rank_environment import RankEnvironment
from trainer.distributed.settings import DistributedSettings

SILENT_S = 6.0


def test_rank_that_cannot_reach_rank_0_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connecting, "JOIN_S", 1.0)
    before = signal.getsignal(signal.SIGINT)
    try:
        code = follow(RankEnvironment(1, 2, 1, "127.0.0.1", 9, "torchrun"), DistributedSettings(timeout_s=1))
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr().err
    assert code == 1 and told.count("mtrl-train: rank 1 (") == 1
    assert "2 ranks could not connect at 127.0.0.1:9" in told and "remedy: start all of them" in told


def test_launchers_port_that_is_taken_meanwhile_is_no_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_STORE, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = RankEnvironment(0, 2, 0, "127.0.0.1", taken.getsockname()[1], "srun")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "")  # It sets them, which ends with this test.
        with pytest.raises(LostRankError, match="could not connect") as raised:
            connect_ranks(environment, DistributedSettings(ranks=2))
    assert raised.value.exit_code == 1, "launchers start the ranks again"


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        (0, r"rank 1 \(.*, process \d+\): rank 1 is number 2 on a machine with 0 GPUs"),
        (2, r"rank 1 \(.*, process \d+\) computes on cuda, rank 0 \(.*\) on cpu"),
    ],
)
def test_rank_whose_gpus_do_not_fit_is_told_by_rank_0(
    gpus: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sitecustomize"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n    import torch\n    torch.cuda.is_available = lambda: True\n"
        f"    torch.cuda.device_count = lambda: {gpus}\n    torch.cuda.set_device = lambda _: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    settings = DistributedSettings(ranks=2)
    with pytest.raises(RankError, match=told), LocalRanks(settings, tmp_path) as local:
        connect_ranks(local.environment, settings, local.listener, local.find_ended)


def test_ranks_do_not_get_the_token_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ranks, "END_WAIT_S", 0.1)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with LocalRanks(DistributedSettings(ranks=2), tmp_path) as local:
        environment = psutil.Process(local._children[1].pid).environ()
    assert environment["RANK"] == "1" and TOKEN_VARIABLE not in environment


def test_error_of_rank_0_itself_is_not_told_as_a_late_rank(tmp_path: Path) -> None:
    told = r"rank 0 \(.*\): RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(RankError, match=told), running_ranks(2, tmp_path) as channel:
        assert not [name for name in INTERFACE_VARIABLES if name in os.environ]  # Servers inherit the environment.
        with channel.command("check", {"model": str(tmp_path)}):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def signal_rank_under_torchrun(
    folder: Path, rank: int, number: signal.Signals, **settings: Any
) -> tuple[psutil.Process, str, str]:
    """Signals a rank of a job of two; returns it, the one line that says why the job ended, and the whole output."""
    write_config(engine="torch", prompts=2, n=3, record=False, steps=10_000, **settings)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trainer.cli")
    metrics = folder / "runs/a/metrics.jsonl"
    with run_process(folder, *launcher, "--config", "run.yaml", "--out", "runs/a") as process:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, process)
        (signalled,) = (
            child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == str(rank)
        )
        os.kill(signalled.pid, number)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and "--resume" in output, output
    reasons = [line for line in output.splitlines() if line.startswith("mtrl-train: ")]
    assert len(reasons) == 1, output
    return signalled, reasons[0], output


def test_rank_killed_under_torchrun_is_named_though_rank_0_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    killed, reason, _ = signal_rank_under_torchrun(tmp_path, 1, signal.SIGKILL)
    assert "was told to end by torchrun (SIGTERM)" in reason or f"process {killed.pid}), last seen in" in reason
    logs = {log.name: log.read_text() for log in (tmp_path / "runs/a/logs").iterdir()}
    assert logs.keys() == {"rank-0.log", "rank-1.log"} and reason in logs["rank-0.log"]


def test_stopped_rank_0_under_torchrun_is_named_by_another_rank_and_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = {"timeout_s": SILENT_S}
    stopped, reason, output = signal_rank_under_torchrun(tmp_path, 0, signal.SIGSTOP, distributed=limits)
    assert reason.startswith("mtrl-train: rank 0 (") and f"process {stopped.pid})" in reason
    assert f"has shown no sign of life for {SILENT_S:.0f} s" in reason and "continue with --resume" in output
    assert not stopped.is_running(), "the launcher kills it"
