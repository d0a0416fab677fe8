"""Workers whose training process or gateway is away: they wait with growing pauses, and are not started again."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from gateway.http.settings import Settings
from mtrl_plugins.workers import worker_process
from mtrl_plugins.workers.line_channel import TOKEN_VARIABLE
from mtrl_plugins.workers.worker_process import AwayError, retry_while_away
from tests.live_server import live_server_async
from tests.plugins.workers.pools import GatedEngine, make_pool, write_tools
from tests.servers.start_server import free_port
from tests.trainer.policy_scripts import make_gateway
from tests.waiting import wait_until

LONG_S = 150.0
TOKEN = "a token of this test only"


@asynccontextmanager
async def running_worker(log: Path, *words: str) -> AsyncIterator[anyio.abc.Process]:
    """A worker process, which writes to the log."""
    with log.open("wb") as file:
        command = [sys.executable, "-m", "trainer.cli", "worker", *words]
        process = await anyio.open_process(command, stdin=None, stdout=file, stderr=file)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()


async def wait_for_words(log: Path, process: anyio.abc.Process, words: str) -> None:
    read = log.read_text
    await wait_until(lambda: words in read() or process.returncode is not None, LONG_S)
    assert words in read(), read()


async def test_worker_waits_for_its_run_and_gateway_and_joins_the_run_again_after_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    folder, port, tools_port = write_tools(tmp_path / "job"), free_port(), free_port()
    log, place = tmp_path / "worker.log", f"127.0.0.1:{port}"
    words = ("--connect", place, "--name", "far", "--tools", f"http://127.0.0.1:{tools_port}")
    async with running_worker(log, *words) as process:
        await wait_for_words(log, process, f"no training process answers at {place}")
        async with anyio.create_task_group() as tasks:
            left = anyio.Event()

            async def run_pool() -> None:
                with pytest.RaisesGroup(RuntimeError):
                    async with make_pool(folder, GatedEngine(), listen=place):
                        raise RuntimeError("a rank is lost")
                async with make_pool(folder, GatedEngine(), listen=place) as pool:
                    assert pool.alive == 1
                left.set()

            tasks.start_soon(run_pool)
            await wait_for_words(log, process, f"the gateway at http://127.0.0.1:{tools_port} cannot be reached")
            async with live_server_async(make_gateway, Settings(port=tools_port)):
                with anyio.fail_after(LONG_S):
                    await left.wait()
                    assert await process.wait() == 0, log.read_text()  # The same process all the time.
    assert "is lost: the connection was closed; it is waited for" in log.read_text()


async def test_worker_that_may_not_wait_ends_with_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    place, log = f"127.0.0.1:{free_port()}", tmp_path / "worker.log"
    async with running_worker(log, "--connect", place, "--wait", "0") as process:
        with anyio.fail_after(LONG_S):
            assert await process.wait() == 2
    assert f"no training process answers at {place}" in log.read_text() and "remedy:" in log.read_text()


class Pauses:
    """A clock that only pauses turn, and what is told."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.told: list[str] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)

    def current_time(self) -> float:
        return sum(self.pauses)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr(worker_process, "anyio", SimpleNamespace(sleep=pauses.sleep, current_time=pauses.current_time))
    monkeypatch.setattr(worker_process, "random", SimpleNamespace(uniform=lambda low, high: high))
    return pauses


async def test_pauses_grow_until_the_time_is_up_and_each_reason_is_told_once(pauses: Pauses) -> None:
    reasons = iter(["it is off"] * 3 + ["it starts"] * 100)

    async def fail() -> Any:
        raise AwayError(next(reasons))

    with pytest.raises(AwayError, match="it starts"):
        await retry_while_away(fail, 60.0, pauses.told.append)
    assert pauses.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0, 4.5]
    assert [text.split(";")[0] for text in pauses.told] == ["it is off", "it starts"]


async def test_only_what_is_away_is_tried_again(pauses: Pauses) -> None:
    answers: list[Any] = [AwayError("it is off"), 7]

    async def attempt() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    assert await retry_while_away(attempt, 60.0, pauses.told.append) == 7 and len(pauses.pauses) == 1
    answers = [ValueError("wrong"), 7]
    with pytest.raises(ValueError, match="wrong"):
        await retry_while_away(attempt, 60.0, pauses.told.append)
