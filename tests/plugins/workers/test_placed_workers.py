"""Rollout workers that a launcher starts: the run listens where the launcher says, and notices who comes back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from gateway.errors import ConfigError, unwrap_error
from mtrl_plugins.cluster.node_process import NodeProcess
from mtrl_plugins.workers.line_channel import TOKEN_VARIABLE
from mtrl_plugins.workers.settings import WorkerSettings
from mtrl_plugins.workers.worker_pool import (
    PLACED_VARIABLE,
    LateWorkersError,
    TakenPortError,
    WorkersError,
    find_placed_workers,
    read_worker_token,
)
from tests.plugins.workers.pools import GatedEngine, make_pool, write_tools
from tests.trainer.tokenizer_families import FAMILIES, save_tokenizer_folder
from tests.waiting import wait_until

TOKEN = "a token of this test only"
LONG_S = 150.0
SILENT_S = 5.0


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, free_tcp_port: int) -> str:
    """Where the launcher says that its workers connect."""
    address = f"127.0.0.1:{free_tcp_port}"
    monkeypatch.setenv(PLACED_VARIABLE, address)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return address


@contextmanager
def run_worker(address: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker as a launcher starts it, before or after the run."""
    command = [sys.executable, "-m", "trainer.cli", "worker", "--connect", address, "--name", "worker-0", *words]
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_workers_of_a_launcher_are_the_runs_own_and_count_as_restarted_when_they_come_back(
    address: str, tmp_path: Path
) -> None:
    folder = write_tools(tmp_path / "job")
    with anyio.fail_after(LONG_S), run_worker(address) as first:
        async with make_pool(folder, GatedEngine(), workers=1) as pool:
            assert pool.describe() == "1 of 1 up" and pool.take_metrics()["workers/restarts"] == 0
            first.kill()
            await wait_until(lambda: pool.alive == 0, LONG_S)
            with run_worker(address) as second:
                await wait_until(lambda: pool.alive == 1, LONG_S)
                assert pool.describe() == "1 of 1 up, 1 restarts" and pool.take_metrics()["workers/restarts"] == 1
                pool._is_over = True
                await pool._end_all()
                assert await anyio.to_thread.run_sync(second.wait, LONG_S) == 0, "it ends with the run"


async def test_worker_of_a_launcher_that_is_stopped_is_killed_by_what_started_it_and_comes_back(
    address: str, tmp_path: Path
) -> None:
    folder, keeper = write_tools(tmp_path / "job"), NodeProcess()
    command = (sys.executable, "-m", "trainer.cli", "worker", "--connect", address, "--name", "worker-0")
    keep = partial(keeper.keep_running, command, {}, os.getcwd(), str(tmp_path / "log"), SILENT_S)
    with anyio.fail_after(2 * LONG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, keep)
            async with make_pool(folder, GatedEngine(), workers=1) as pool:
                assert keeper._process is not None
                os.kill(keeper._process.pid, signal.SIGSTOP)
                await wait_until(lambda: pool.restarts == 1 and pool.alive == 1, LONG_S)
                assert pool.describe() == "1 of 1 up, 1 restarts"
            await anyio.to_thread.run_sync(keeper.stop, signal.SIGTERM, LONG_S)


async def test_worker_of_a_launcher_that_cannot_play_ends_the_run_with_its_reason(address: str, tmp_path: Path) -> None:
    folder = write_tools(tmp_path / "job")
    save_tokenizer_folder(FAMILIES["llama3"], tmp_path)
    with pytest.raises((WorkersError, ExceptionGroup)) as raised, run_worker(address, "--model", str(tmp_path)):
        with anyio.fail_after(LONG_S):
            await make_pool(folder, GatedEngine(), workers=1).__aenter__()
    problem = str(unwrap_error(raised.value))
    assert "worker-0 cannot start" in problem and "not the model of the training process" in problem


def test_launchers_try_again_after_what_may_pass_and_not_after_workers_that_cannot_start() -> None:
    assert LateWorkersError("late").exit_code == TakenPortError("taken").exit_code == 1
    assert not hasattr(WorkersError("cannot start"), "exit_code"), "the default says that it would happen again"


async def test_launchers_port_that_is_taken_meanwhile_is_no_mistake_of_the_user(address: str, tmp_path: Path) -> None:
    host, _, port = address.partition(":")
    folder = write_tools(tmp_path / "job")
    with socket.create_server((host, int(port))), pytest.raises((TakenPortError, ExceptionGroup)) as raised:
        await make_pool(folder, GatedEngine(), workers=1).__aenter__()
    error = unwrap_error(raised.value)
    assert isinstance(error, TakenPortError) and error.exit_code == 1, "launchers start the ranks again"
    assert f"the launcher's place for rollout workers, {address}, cannot be listened on" in str(error)


def test_launchers_address_needs_a_token_and_only_counts_with_workers(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_worker_token(WorkerSettings(workers=1)) == TOKEN
    assert find_placed_workers(WorkerSettings()) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match=PLACED_VARIABLE):
        read_worker_token(WorkerSettings(workers=1))
    monkeypatch.setenv(PLACED_VARIABLE, "nowhere")
    with pytest.raises(ConfigError, match="should be host:port"):
        find_placed_workers(WorkerSettings(workers=1))
