"""Sixty-four sessions of each framework are open when a side is killed: its rollouts end, and no process is left."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from uuid import uuid4

import anyio
import psutil
import pytest

from tests.environments.killed_run import CASES
from tests.environments.real_environments import REFERENCE_S, ROOT, connections_of, open_held, open_vault
from tests.plugins.environments.environment_runs import settings_pid
from tests.waiting import wait_until
from trainer.rollout.rollout import StopReason

MARK = "MTRL_KILL_TEST"


def processes_with(mark: str) -> list[int]:
    """The other processes whose environment variables have a mark, whatever started them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.fixture
async def server(request: pytest.FixtureRequest) -> AsyncIterator[tuple[psutil.Popen | None, str]]:
    """The server of a case that needs one, and its address."""
    async with AsyncExitStack() as stack:
        if request.getfixturevalue("name") == "openenv":
            yield await stack.enter_async_context(open_vault())
        else:
            yield None, ""


@pytest.mark.parametrize("name", CASES)
async def test_killed_trainer_leaves_no_process_and_no_session(
    name: str, server: tuple[psutil.Popen | None, str]
) -> None:
    mark, (process, url) = uuid4().hex, server
    with anyio.fail_after(REFERENCE_S):
        done = await anyio.run_process(
            [sys.executable, "-m", "tests.environments.killed_run", name, *([url] if url else [])],
            env={**os.environ, MARK: mark, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"}, check=False,
        )  # fmt: skip
    assert done.returncode == -9, done.stderr.decode()[-4000:]
    processes, ended = map(int, done.stdout.split())
    assert ended == 0
    assert processes >= (CASES[name].sessions if name == "verifiers-servers" else 0 if url else 1)
    await wait_until(lambda: not processes_with(mark))
    if process is not None:
        await wait_until(lambda: connections_of(process) == 0)


@pytest.mark.parametrize("name", CASES)
async def test_killed_environment_costs_its_rollouts_and_leaves_no_process(
    name: str, server: tuple[psutil.Popen | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, (process, url), case = uuid4().hex, server, CASES[name]
    monkeypatch.setenv(MARK, mark)
    async with case.open(url) as runs:
        async with open_held(runs, case.turn, case.sessions) as rollouts:
            if process is not None:
                process.kill()
            else:
                assert processes_with(mark)
                os.kill(settings_pid(runs), 9)
            await wait_until(lambda: not processes_with(mark))
        assert [rollout.stop for rollout in rollouts] == [StopReason.TOOL_FAILED] * case.sessions
        group = await runs.score(*rollouts)
        assert not group.scored
