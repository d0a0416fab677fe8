"""Starts the other ranks of `--ranks N` as child processes. Each ends with this process, and the run ends with each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.distributed.connect_ranks import LOOPBACK
from trainer.distributed.rank_environment import LAUNCHED, RankEnvironment
from trainer.distributed.rank_output import rank_log
from trainer.distributed.settings import DistributedSettings

SECRET_VARIABLES = frozenset({"MTRL_WORKER_TOKEN"})
"""What rank 0 alone needs of the environment."""
END_WAIT_S = 10.0
"""How long a child may take to end by itself."""
MODULE = "trainer.distributed.follow"


class LocalRanks:
    """The child processes, and the socket where all ranks meet, which only this machine can reach."""

    def __init__(self, settings: DistributedSettings, log_folder: Path) -> None:
        self.size, self._settings, self._log_folder = settings.ranks, settings, log_folder
        self.listener = socket.create_server((LOOPBACK, 0), backlog=self.size)
        self.environment = RankEnvironment(0, self.size, 0, LOOPBACK, self.listener.getsockname()[1], "--ranks")
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
        for rank in range(1, self.size):
            variables = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(self.environment.port), LAUNCHED: "1",
            }  # fmt: skip
            with self.log_file(rank).open("ab") as log:
                child = self._children[rank] = subprocess.Popen(  # noqa: S603 (a Python of the operator's and our own module)
                    [sys.executable, "-m", MODULE],
                    env={**inherited, **variables},
                    stdin=subprocess.PIPE,  # It ends with this process, and the child with it.
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for rank 0, which ends the others.
                )
            if child.stdin:
                with suppress(BrokenPipeError):  # `find_ended` tells how it ended.
                    child.stdin.write(self._settings.model_dump_json().encode() + b"\n")
                    child.stdin.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + (END_WAIT_S if kind is None else 1.0)
        for child in self._children.values():
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdin:
                with suppress(BrokenPipeError):
                    child.stdin.close()
        self.listener.close()
        for rank in self._children:
            if self.log_file(rank).exists() and not self.log_file(rank).stat().st_size:
                self.log_file(rank).unlink()

    def kill(self) -> None:
        """Ends the child processes, also those that are stopped, without waiting for their end."""
        for child in self._children.values():
            child.kill()

    def log_file(self, rank: int) -> Path:
        """Where a rank's own output goes."""
        return rank_log(self._log_folder, rank)

    def find_ended(self) -> dict[int, str]:
        """The ranks that have ended, and how."""
        codes = {rank: child.poll() for rank, child in self._children.items()}
        return {rank: _describe_end(code) for rank, code in codes.items() if code is not None}


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
