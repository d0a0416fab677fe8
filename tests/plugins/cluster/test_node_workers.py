"""`mtrl-train node-workers`: a rendered job's rollout workers, dealt over its nodes, which end with the node's rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from mtrl_plugins.workers.line_channel import TOKEN_VARIABLE
from mtrl_plugins.workers.worker_pool import PLACED_VARIABLE
from tests.plugins.workers.pools import GatedEngine, list_workers, make_pool, write_tools
from tests.waiting import wait_until

LONG_S = 150.0
RANK = '"$@" --parent $$ & exec sleep 1000'
"""A node's first rank, which starts the workers and becomes another program."""


def start_rank(address: str, logs: Path, node: int) -> subprocess.Popen[bytes]:
    words = ("--connect", address, "--workers", "3", "--node", str(node), "--nodes", "2", "--logs", str(logs))
    return subprocess.Popen(["sh", "-c", RANK, "sh", sys.executable, "-m", "trainer.cli", "node-workers", *words])


async def test_workers_of_two_nodes_play_for_rank_0_and_end_with_their_nodes_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_tcp_port: int
) -> None:
    address = f"127.0.0.1:{free_tcp_port}"
    monkeypatch.setenv(PLACED_VARIABLE, address)
    monkeypatch.setenv(TOKEN_VARIABLE, "a token of this test only")
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    ranks = [start_rank(address, tmp_path / "logs", node) for node in range(2)]
    started: list[psutil.Process] = []
    try:
        with anyio.fail_after(2 * LONG_S):
            async with make_pool(write_tools(tmp_path / "job"), GatedEngine(), workers=3) as pool:
                assert pool.describe() == "3 of 3 up"
                started = [child for rank in ranks for child in children_of(rank)]
                names = {node: sorted(worker_names(rank)) for node, rank in enumerate(ranks)}
                assert names == {0: ["worker-0", "worker-2"], 1: ["worker-1"]}
                assert len(list(temporary.glob("mtrl-beat-*"))) == 3
                ranks[0].kill()
                await wait_until(lambda: pool.alive == 1, LONG_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(started, timeout=LONG_S))
    await wait_until(lambda: not list(temporary.glob("mtrl-beat-*")), LONG_S)
    assert not alive and sorted(log.name for log in (tmp_path / "logs").iterdir()) == [
        "worker-0.log",
        "worker-1.log",
        "worker-2.log",
    ]


def test_workers_whose_rank_is_gone_before_they_start_end_at_once(tmp_path: Path) -> None:
    words = ("--connect", "127.0.0.1:1", "--workers", "1", "--node", "0", "--nodes", "1", "--logs", str(tmp_path))
    command = [sys.executable, "-m", "trainer.cli", "node-workers", *words, "--parent", "1"]
    environment = {**os.environ, TOKEN_VARIABLE: "a token of this test only"}
    assert subprocess.run(command, env=environment, timeout=LONG_S, check=False).returncode == 0


def children_of(rank: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(rank.pid).children(recursive=True) if rank.poll() is None else []


def worker_names(rank: subprocess.Popen[bytes]) -> list[str]:
    workers = list_workers(psutil.Process(rank.pid)) if rank.poll() is None else []
    lines = [worker.cmdline() for worker in workers]
    return [line[line.index("--name") + 1] for line in lines if "--name" in line]
