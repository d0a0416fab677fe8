"""A process whose CPU time and memory are measured, its children's apart.

Its first line on stdout says that it is ready; a server's first line has its URL.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

import psutil

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0


class MeasuredProcess:
    """A child process under measurement."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._stderr = TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True, env=env)
        self._process = psutil.Process(self._popen.pid)
        self.first_line = self._read_line(START_TIMEOUT_S)

    @property
    def url(self) -> str:
        return next(word for word in self.first_line.split() if word.startswith("http://"))

    def send_order(self, timeout_s: float, **order: Any) -> dict[str, float]:
        """Writes a JSON line to stdin and returns the JSON line of the answer."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(order) + "\n")
        self._popen.stdin.flush()
        answer: dict[str, float] = json.loads(self._read_line(timeout_s))
        return answer

    def _read_line(self, timeout_s: float) -> str:
        """Reads one line; kills the process if it takes too long, which ends the wait."""
        assert self._popen.stdout is not None
        timer = threading.Timer(timeout_s, self._popen.kill)
        timer.start()
        try:
            line = self._popen.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            problem = f"{self.name} ended, or printed nothing for {timeout_s:g} s"
            raise RuntimeError(f"{problem}; last line of its stderr: {self._last_line}")
        return line.strip()

    @property
    def _last_line(self) -> str:
        self._stderr.seek(0)
        return (self._stderr.read().strip().splitlines() or ["none"])[-1]

    @property
    def cpu_s(self) -> float:
        return _cpu_s(self._process)

    @property
    def children_cpu_s(self) -> float:
        return sum(map(_cpu_s, self._process.children(recursive=True)))

    @property
    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def stop(self) -> None:
        self._popen.terminate()
        with suppress(OSError):
            self._popen.communicate(timeout=STOP_TIMEOUT_S)
        if self._popen.poll() is None:
            self._popen.kill()
        self._stderr.close()


def _cpu_s(process: psutil.Process) -> float:
    """By the process's own CPU clock, where there is one: the counters that psutil reads go in steps of 10 ms."""
    try:
        if sys.platform == "linux":
            return time.clock_gettime(~process.pid << 3 | 2)
        times = process.cpu_times()
    except (psutil.NoSuchProcess, OSError):
        return 0.0
    return float(times.user + times.system)
