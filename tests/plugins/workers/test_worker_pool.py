"""Rollout workers as processes: what they play, and what happens if they are killed, hang, or are strangers."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from socket import gethostname

import anyio
import pytest

from gateway.version import installed_version
from mtrl_plugins.workers import line_channel, messages, worker_pool
from mtrl_plugins.workers.line_channel import TOKEN_VARIABLE, Address, ChannelError, LineChannel, greet_trainer
from mtrl_plugins.workers.worker_pool import WorkerPool
from tests.plugins.workers.pools import GatedEngine, find_workers, make_pool, make_runner, read_acts, tasks, write_tools
from tests.trainer.tokenizer_families import FAMILIES, save_tokenizer_folder
from tests.waiting import wait_until
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.scheduler import Scheduler

TOKEN = "a token of this test only"
LONG_S = 150.0
"""Within which workers start, also on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tools(tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module")
async def shared(folder: Path) -> AsyncIterator[tuple[WorkerPool, GatedEngine]]:
    """Two workers for all tests of this module."""
    os.environ[TOKEN_VARIABLE] = TOKEN
    engine = GatedEngine()
    try:
        async with make_pool(folder, engine, workers=2, listen="127.0.0.1:0", heartbeat_timeout_s=60.0) as pool:
            yield pool, engine
    finally:
        del os.environ[TOKEN_VARIABLE]
    assert find_workers() == []


@pytest.fixture
async def pool(shared: tuple[WorkerPool, GatedEngine], folder: Path) -> WorkerPool:
    pool, engine = shared
    engine.gate = anyio.Event()
    (folder / "tools/acts.txt").unlink(missing_ok=True)
    await wait_until(lambda: pool.alive == 2, LONG_S)
    return pool


@pytest.fixture
def engine(shared: tuple[WorkerPool, GatedEngine]) -> GatedEngine:
    return shared[1]


class Playing:
    """Rollouts under way in the pool."""

    def __init__(self, folder: Path, engine: GatedEngine, pool: WorkerPool, *names: str) -> None:
        self._runner, self._names = make_runner(folder, engine, pool), names
        self.engine = engine
        self.rollouts: dict[str, Rollout] = {}

    async def run(self, *, disturb: object = None) -> None:
        """Plays all rollouts; `disturb` is called once all of them wait in their second turn."""
        with anyio.fail_after(LONG_S):
            async with anyio.create_task_group() as running:
                for task in tasks(*self._names):
                    running.start_soon(self._run_one, task)
                await wait_until(lambda: +self.engine.at_gate == dict.fromkeys(self._names, 1), LONG_S)
                if callable(disturb):
                    await disturb()
                self.engine.gate.set()

    async def _run_one(self, task: object) -> None:
        rollout = await self._runner.run(task, group="g")  # type: ignore[arg-type]
        self.rollouts[rollout.task] = rollout

    def stops(self, prefix: str) -> list[str]:
        return sorted(str(rollout.stop) for name, rollout in self.rollouts.items() if name.startswith(prefix))


async def test_killed_workers_rollouts_begin_again_unless_they_have_acted(
    folder: Path, engine: GatedEngine, pool: WorkerPool
) -> None:
    names = [f"{tool}-{number}" for tool in ("act", "safe") for number in range(4)]
    playing = Playing(folder, engine, pool, *names)
    restarts = pool.restarts

    async def kill() -> None:
        find_workers("worker-0")[0].kill()
        await wait_until(lambda: len(playing.rollouts) == 2, LONG_S)  # Its two that have acted are lost at once.

    await playing.run(disturb=kill)
    assert playing.stops("safe") == ["done"] * 4
    assert playing.stops("act") == ["done"] * 2 + ["worker_lost"] * 2
    assert read_acts(folder) == names[:4]
    lost = next(rollout for rollout in playing.rollouts.values() if rollout.stop is StopReason.WORKER_LOST)
    assert "worker-0" in lost.reason and lost.rewards == {}
    await wait_until(lambda: pool.alive == 2 and pool.restarts > restarts, LONG_S)
    metrics = pool.take_metrics()
    assert metrics["workers/lost_rollouts"] == 4 and metrics["workers/restarts"] >= 1


async def test_worker_that_hangs_is_killed_and_its_rollouts_begin_again(
    folder: Path, engine: GatedEngine, pool: WorkerPool
) -> None:
    others = find_workers()
    async with make_pool(folder, engine, workers=1, heartbeat_timeout_s=10.0) as own:
        (stopped,) = [worker for worker in find_workers("worker-0") if worker not in others]

        async def hang() -> None:
            stopped.send_signal(signal.SIGSTOP)
            await wait_until(lambda: not stopped.is_running(), LONG_S)

        playing = Playing(folder, engine, own, "safe-1", "safe-2")
        await playing.run(disturb=hang)
        assert playing.stops("safe") == ["done", "done"] and own.restarts >= 1


@asynccontextmanager
async def connect(pool: WorkerPool) -> AsyncIterator[LineChannel]:
    assert pool.address
    async with await anyio.connect_tcp(*pool.address) as stream:
        yield LineChannel(stream)


async def test_strangers_and_broken_messages_cost_only_their_own_connection(
    folder: Path, engine: GatedEngine, pool: WorkerPool
) -> None:
    restarts = pool.restarts
    async with connect(pool) as channel:
        with pytest.raises(ChannelError, match="the token is another one"):
            await greet_trainer(channel, "another token", installed_version(), name="x")
    async with connect(pool) as channel:
        with pytest.raises(ChannelError, match="install the same"):
            await greet_trainer(channel, TOKEN, "0.0.1", name="x")
    async with connect(pool) as channel:
        await greet_trainer(channel, TOKEN, installed_version(), name="x")
        assert (await channel.receive(60))["job"]["settings"]["seed"] == 3
        await channel.send_now({"t": "ready"})
        await wait_until(lambda: pool.alive == 3, LONG_S)
        await channel.send_now({"t": "done"})
        await wait_until(lambda: pool.alive == 2, LONG_S)
    surrogate = b'{"name":"x","proof":"a","nonce":"\\ud800"}\n'
    for line in (b"\xff\n", b"[1]\n", b"{}\n", b"x" * 100_000, surrogate):
        async with connect(pool) as channel:
            await channel.receive(60)
            await channel._stream.send(line)
            with pytest.raises(ChannelError, match="closed"):
                await channel.receive(60)
    playing = Playing(folder, engine, pool, "safe-1", "safe-2")
    await playing.run()
    assert playing.stops("safe") == ["done", "done"] and pool.restarts == restarts


async def test_strangers_from_elsewhere_do_not_keep_workers_of_this_machine_out(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_STRANGERS", 1)
    monkeypatch.setattr(line_channel, "ANSWER_S", 2 * LONG_S)
    restarts = pool.restarts
    async with connect(pool) as waiting, connect(pool) as refused:
        assert await waiting.receive(60)
        with pytest.raises(ChannelError, match="closed"):
            await refused.receive(60)
        find_workers("worker-1")[0].kill()
        await wait_until(lambda: pool.alive == 2 and pool.restarts > restarts, LONG_S)


async def test_worker_of_another_machine_joins_plays_and_leaves(
    folder: Path, engine: GatedEngine, pool: WorkerPool
) -> None:
    words = ("-m", "trainer.cli", "worker", "--connect", str(pool.address), "--name", "far")
    process = await anyio.open_process([sys.executable, *words], stdout=None, stderr=None)  # With our environment.
    async with process:
        try:
            await wait_until(lambda: pool.alive == 3, LONG_S)
            assert pool.describe().startswith("2 of 2 up, 1 on other machines")
            playing = Playing(folder, engine, pool, "safe-1", "safe-2", "safe-3")

            async def leave() -> None:
                assert [link.load for link in pool._links] == [1, 1, 1]
                process.terminate()

            await playing.run(disturb=leave)
            assert playing.stops("safe") == ["done"] * 3
            await wait_until(lambda: pool.alive == 2, LONG_S)
        finally:
            if process.returncode is None:
                process.kill()


async def test_worker_with_another_tokenizer_is_refused_by_name(
    pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer_folder(FAMILIES["llama3"], tmp_path)
    words = ("-m", "trainer.cli", "worker", "--connect", str(pool.address), "--name", "odd", "--model", str(tmp_path))
    with anyio.fail_after(LONG_S):
        refused = await anyio.run_process([sys.executable, *words], check=False)
    assert refused.returncode == 2
    for text in ("its tokenizer has", "not the model of the training process", "--model"):
        assert text in refused.stderr.decode()
    await wait_until(lambda: "worker odd of another machine is lost" in capsys.readouterr().out, LONG_S)
    assert pool.alive == 2


async def test_oversized_task_ends_by_itself_and_no_worker_is_lost(
    folder: Path, engine: GatedEngine, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_channel, "MAX_LINE_BYTES", 100_000)
    monkeypatch.setattr(messages, "MAX_BLOB_BYTES", 100_000)
    restarts, _ = pool.restarts, pool.take_metrics()
    for value in ("x" * 100_000, b"x" * 100_001, b"x" * 90_000):  # As a line of base64, the last one is too long.
        (task,) = tasks("safe-1")
        large = replace(task, columns={"text": value}, location="rows.jsonl:7")
        rollout = await make_runner(folder, engine, pool).run(large, group="g")
        assert rollout.stop is StopReason.ERROR and "rows.jsonl:7: the task cannot be sent" in rollout.reason
    playing = Playing(folder, engine, pool, "safe-1", "safe-2")
    await playing.run()
    assert playing.stops("safe") == ["done", "done"]
    assert pool.restarts == restarts and pool.take_metrics()["workers/lost_rollouts"] == 0


async def test_cancelled_rollouts_leave_nothing_under_way(folder: Path, engine: GatedEngine, pool: WorkerPool) -> None:
    scheduler = Scheduler(make_runner(folder, engine, pool), 2)
    async with scheduler.submit(tasks("safe-1", "safe-2")):
        await wait_until(lambda: engine.at_gate.total() == 4, LONG_S)
    assert engine.at_gate.total() == 0 and sum(link.load for link in pool._links) == 0
    playing = Playing(folder, engine, pool, "safe-1")
    await playing.run()
    assert playing.stops("safe") == ["done"]


def test_address_is_read_with_host_and_port() -> None:
    assert Address.parse("[::1]:80") == Address("::1", 80) and str(Address("::1", 80)) == "[::1]:80"
    assert Address.parse("fd00::1:80") == Address("fd00::1", 80), "as a pod's script writes it"
    assert json.dumps(Address.parse("h:1")) == '["h", 1]'
    assert Address.parse("0.0.0.0:1").for_others == Address.parse("[::]:1").for_others == Address(gethostname(), 1)
    assert Address.parse("10.0.0.1:1").for_others == Address("10.0.0.1", 1)
