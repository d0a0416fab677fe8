"""The rollout workers of a rendered job on one of its nodes: started, restarted, and ended with the node's rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainer.cluster.ray_actor import PYTHON, NodeProcess
from trainer.cluster.ray_workers import WorkerPlace

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
    silent_s: float
    logs: Path

    @property
    def names(self) -> list[str]:
        """Those of this node."""
        return [f"worker-{index}" for index in range(self.node, self.workers, self.nodes)]


def run_node_workers(job: NodeWorkers, log: Callable[[str], None]) -> None:
    """Keeps the workers running until all have ended, this process is told to end, or the one that started it is gone:
    the node's first rank, or what became of it."""
    parent, processes = os.getppid(), {name: NodeProcess() for name in job.names}
    if not processes:
        return
    is_told: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        is_told.append(number)

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
        while left and not is_told and os.getppid() == parent:
            done, left = wait(left, LOOK_S)
            for future in done:
                if code := future.result():
                    name = running[future]
                    log(f"the rollout worker {name} failed too often (code {code}): see {job.logs / name}.log")
        for process in processes.values():
            process.stop(signal.SIGTERM, END_S)
