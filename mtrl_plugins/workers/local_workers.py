"""Worker processes on this machine: started, restarted with growing delays, and ended with all that they started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import anyio

from gateway.mcp_client.reaper import Reaper
from gateway.mcp_client.supervised_process import SupervisedProcess, close_pipes
from mtrl_plugins.workers.handshake import TOKEN_VARIABLE
from mtrl_plugins.workers.line_channel import Address
from mtrl_plugins.workers.worker_link import WorkerLink

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Delays before a worker is restarted: each is twice the one before."""
STEADY_S = 300.0
"""A worker that was up for so long is restarted with the first delay."""
POLL_S = 0.1
GRACE_S = 3.0
"""How long a worker that is no longer needed may take to end."""
MAX_LOG_BYTES = 64 << 20
"""A longer log is begun again when its worker is restarted."""


class LocalWorker:
    """One worker of this machine."""

    def __init__(
        self, name: str, token: str, log_file: Path, reaper: Reaper, on_end: Callable[[LocalWorker], None]
    ) -> None:
        """`on_end` is called whenever the process has ended, before it is started again."""
        self.name, self.token, self.log_file = name, token, log_file
        self.restarts, self.problem = 0, ""
        self.link: WorkerLink | None = None
        """Its connection, once it has one."""
        self.is_ending = False
        self.delay_s = FIRST_DELAY_S
        """How long it waits before the next start."""
        self._reaper, self._on_end = reaper, on_end

    async def keep_running(self, address: Address) -> None:
        """Starts the process, and again whenever it ends, until this is cancelled."""
        while not self.is_ending:
            started = time.monotonic()
            await self._run_once(address)
            if self.is_ending:
                return
            if time.monotonic() - started > STEADY_S:
                self.delay_s = FIRST_DELAY_S
            self._on_end(self)
            await anyio.sleep(self.delay_s)
            self.delay_s = min(2 * self.delay_s, LONGEST_DELAY_S)
            self.restarts += 1

    async def _run_once(self, address: Address) -> None:
        """Runs the process until it ends or its connection is lost."""
        self.link = None
        await self._reaper.start()
        try:
            log = _open_log(self.log_file)
        except OSError as error:
            self.problem = f"{self.log_file} cannot be written ({error.strerror})"
            return
        with log:
            words = ("-m", "trainer.cli", "worker", "--connect", str(address), "--name", self.name, "--wait", "0")
            environment = {**os.environ, TOKEN_VARIABLE: self.token}
            try:
                process = await SupervisedProcess.start(
                    (sys.executable, *words), environment, None, self._reaper, stderr=log.fileno()
                )
            except OSError as error:
                self.problem = f"{sys.executable} cannot be started ({error.strerror})"
                return
        try:
            while process.process.returncode is None and not (self.link and self.link.ended.is_set()):  # noqa: ASYNC110
                await anyio.sleep(POLL_S)
        finally:
            has_ended = self.is_ending or (self.link is not None and self.link.has_ended_itself)
            await process.end(GRACE_S, first_s=GRACE_S if has_ended else 0.0)
            close_pipes(process.process)
        self.problem = self._describe_end(process.process.returncode)

    def _describe_end(self, code: int | None) -> str:
        """Why the process ended, as it said itself or as the system says."""
        if self.link is not None and self.link.problem and not self.link.has_ended_itself:
            return self.link.problem
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"{how}; see {self.log_file}"


def _open_log(file: Path) -> BinaryIO:
    file.parent.mkdir(parents=True, exist_ok=True)  # An evaluation's folder is made when its first rollouts are saved.
    is_long = file.exists() and file.stat().st_size > MAX_LOG_BYTES
    return file.open("wb" if is_long else "ab", buffering=0)
