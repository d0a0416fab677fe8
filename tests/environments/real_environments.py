"""Plays many scripted episodes of the real frameworks, up to 64 at once, and the same with each one's own runner."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil

from tests.plugins.verifiers.verifiers_runs import EnvironmentRuns
from tests.waiting import wait_until
from trainer.rollout.rollout import Rollout

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLES = HERE / "samples"
"""Environments that the tests bring along."""
EPISODES, AT_ONCE = 200, 64
FOLDERS = {"v0": "verifiers-v0", "v1": "verifiers"}
"""The releases of verifiers, by the interface that they have."""
REFERENCE_S = 900
"""How long a framework's own runner may take for all episodes."""

START_S = 240
"""How long a server may take to start for the first time, when its packages are compiled."""


def python_of(name: str) -> str:
    """The Python that has a framework: `.environments/NAME`, or what the variable MTRL_PYTHON_NAME says."""
    default = ROOT / ".environments" / name / "bin/python"
    python = os.environ.get(f"MTRL_PYTHON_{name.upper().replace('-', '_')}") or str(default)
    assert Path(python).exists(), f"{python} is missing: run `make environments`"
    return python


async def run_reference(framework: str, script: Path, *words: str, job: Any) -> Any:
    """What a framework's own runner prints for a job, in its own interpreter."""
    with anyio.fail_after(REFERENCE_S):
        done = await anyio.run_process([python_of(framework), str(script), *words], input=json.dumps(job).encode(),
                                       check=False)  # fmt: skip
    assert done.returncode == 0 and done.stdout, done.stderr.decode()[-4000:]
    return json.loads(done.stdout)


async def play_all(runs: EnvironmentRuns, scripts: Sequence[tuple[int, Sequence[str]]]) -> list[Rollout]:
    """Plays a script on each row, up to 64 of them at once."""
    rollouts: dict[int, Rollout] = {}
    limit = anyio.CapacityLimiter(AT_ONCE)

    async def play(index: int, row: int, turns: Sequence[str]) -> None:
        async with limit:
            rollouts[index] = await runs.run(*turns, row=row, index=index)

    with anyio.fail_after(REFERENCE_S):
        async with anyio.create_task_group() as tasks:
            for index, (row, turns) in enumerate(scripts):
                tasks.start_soon(play, index, row, turns)
    return [rollouts[index] for index in range(len(scripts))]


@asynccontextmanager
async def open_vault(*, has_tools: bool = False) -> AsyncIterator[tuple[psutil.Popen, str]]:
    """A real OpenEnv server in a process of its own, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [python_of("openenv"), str(SAMPLES / "openenv_vault.py"), str(port), *(["tools"] if has_tools else [])]
    server = psutil.Popen(command)
    try:
        await wait_until(lambda: connections_of(server, psutil.CONN_LISTEN) > 0, START_S)
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def connections_of(process: psutil.Process, status: str = psutil.CONN_ESTABLISHED) -> int:
    """How many TCP connections of a process have this status."""
    return sum(connection.status == status for connection in process.net_connections("tcp"))
