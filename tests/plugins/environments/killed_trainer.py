"""A trainer that kills itself while four episodes are in a step that never ends; prints their process."""

from __future__ import annotations

import os
import sys

import anyio
import psutil

from tests.plugins.environments.environment_runs import act, open_run, settings_pid
from tests.plugins.verifiers.verifiers_runs import EnvironmentRuns
from tests.waiting import wait_until


async def main() -> None:
    """Starts the rollouts and kills itself."""
    async with open_run("gymnasium:sample_gym:Echo-v0", args={"trouble": "hang"}) as runs:
        process = psutil.Process(settings_pid(runs))
        threads = process.num_threads()
        async with anyio.create_task_group() as tasks:
            for index in range(4):
                tasks.start_soon(play, runs, index)
            await wait_until(lambda: process.num_threads() >= threads + 4)
            sys.stdout.write(f"{process.pid}\n")
            sys.stdout.flush()
            os.kill(os.getpid(), 9)


async def play(runs: EnvironmentRuns, index: int) -> None:
    """A rollout whose first step hangs."""
    await runs.run(act(2), index=index)


if __name__ == "__main__":
    anyio.run(main)
