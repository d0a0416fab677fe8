"""A process under measurement: it says in its first line that it is ready, and its CPU is told from its children's."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

import psutil

START_S = 90.0
END_S = 20.0


class Measured:
    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._words = TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._words, text=True, env=env)
        self._process = psutil.Process(self._popen.pid)
        self.line = self._read(START_S)
        """What it said first; a server says its URL."""

    @property
    def url(self) -> str:
        return next(word for word in self.line.split() if word.startswith("http://"))

    def ordered(self, patience_s: float, **order: Any) -> dict[str, float]:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(order) + "\n")
        self._popen.stdin.flush()
        answer: dict[str, float] = json.loads(self._read(patience_s))
        return answer

    def _read(self, patience_s: float) -> str:
        """One line; a process that says none in time is ended, which ends the wait."""
        assert self._popen.stdout is not None
        patience = threading.Timer(patience_s, self._popen.kill)
        patience.start()
        try:
            line = self._popen.stdout.readline()
        finally:
            patience.cancel()
        if not line:
            raise RuntimeError(f"{self.name} ended, or said nothing for {patience_s:g} s; its last words: {self._last}")
        return line.strip()

    @property
    def _last(self) -> str:
        self._words.seek(0)
        return (self._words.read().strip().splitlines() or ["none"])[-1]

    @property
    def cpu_s(self) -> float:
        return _cpu_s(self._process)

    @property
    def children_s(self) -> float:
        return sum(map(_cpu_s, self._process.children(recursive=True)))

    @property
    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def end(self) -> None:
        self._popen.terminate()
        with suppress(OSError):
            self._popen.communicate(timeout=END_S)
        if self._popen.poll() is None:
            self._popen.kill()
        self._words.close()


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
