"""The rollout workers of a job on one of its nodes: where they connect, and how they are kept running."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mtrl_plugins.cluster.node_process import PYTHON, NodeProcess
from mtrl_plugins.workers.line_channel import MIN_TOKEN_LENGTH, TOKEN_VARIABLE, Address
from mtrl_plugins.workers.worker_pool import PLACED_VARIABLE

WAIT_S = 1800
"""How long a worker waits for rank 0, which loads the model and waits for servers first."""


@dataclass(frozen=True)
class WorkerPlace:
    """Where the workers of one start of the ranks connect."""

    address: Address
    token: str

    @property
    def leader_variables(self) -> dict[str, str]:
        """Those of rank 0, which listens there."""
        return {PLACED_VARIABLE: str(self.address), **self.variables}

    @property
    def variables(self) -> dict[str, str]:
        """Those of each worker. The token is in no command line, which every user of a node can read."""
        return {TOKEN_VARIABLE: self.token}

    def arguments(self, name: str) -> tuple[str, ...]:
        """Those of the command of a worker."""
        return ("--connect", str(self.address), "--name", name, "--wait", str(WAIT_S))


def choose_worker_place(host: str, port: int, variables: Mapping[str, str] = os.environ) -> WorkerPlace:
    """A place on rank 0's node, with the user's token if there is one, since other workers may have it."""
    given = variables.get(TOKEN_VARIABLE, "")
    return WorkerPlace(Address(host, port), given if len(given) >= MIN_TOKEN_LENGTH else secrets.token_urlsafe(24))


LOOK_S = 1.0
END_S = 10.0
"""How long workers may take to end by themselves."""


@dataclass(frozen=True)
class NodeWorkers:
    """Which of a job's workers run on this node, and what they need."""

    place: WorkerPlace
    workers: int
    """Of the whole job, which are dealt over its nodes in turn."""
    node: int
    nodes: int
    parent: int
    """The process that started this one and becomes the node's first rank. Told, since it may be gone by now."""
    silent_s: float
    logs: Path

    @property
    def names(self) -> list[str]:
        """Those of this node."""
        return [f"worker-{index}" for index in range(self.node, self.workers, self.nodes)]


def run_node_workers(job: NodeWorkers, log: Callable[[str], None]) -> None:
    """Keeps the workers running until all have ended, this process is told to end, or the node's first rank is gone."""
    processes = {name: NodeProcess() for name in job.names}
    if not processes:
        return
    end_signals: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        end_signals.append(number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The ranks stop first, and save what is finished.
    with ThreadPoolExecutor(len(processes)) as pool:
        running = {
            pool.submit(
                process.keep_running,
                (PYTHON, "-m", "trainer.cli", "worker", *job.place.arguments(name)),
                job.place.variables,
                str(Path.cwd()),
                str(job.logs / f"{name}.log"),
                job.silent_s,
            ): name
            for name, process in processes.items()
        }
        left = set(running)
        try:
            while left and not end_signals and os.getppid() == job.parent:
                done, left = wait(left, LOOK_S)
                for future in done:
                    name = running[future]
                    if error := future.exception():
                        log(f"the rollout worker {name} cannot be kept: {error}")
                    elif code := future.result():
                        log(f"the rollout worker {name} failed too often (code {code}): see {job.logs / name}.log")
        finally:
            for process in processes.values():
                process.stop(signal.SIGTERM, END_S)
