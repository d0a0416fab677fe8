"""A process on a node of a cluster: a rank, a server or a rollout worker, started, watched and ended with its keeper.

The keeper is an actor on Ray, and `node_workers.py` elsewhere. Ray's workers import this, so it needs little beyond the
standard library.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from subprocess import STDOUT

from gateway.process.supervised_process import SupervisedProcess
from mtrl_plugins.workers.beat_file import BEAT_VARIABLE, START_S, read_beat

PYTHON = "python"
"""Stands for the Python of the node's Ray as the first word of a command."""
SGLANG_PYTHON = "sglang-python"
"""Stands for the Python of the node that has SGLang."""
FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 60.0
"""Delays before a process is started again: each is twice the one before."""
LOOK_S = 1.0
STEADY_S = 300.0
"""A process that ran for so long is started again with the first delay."""
MAX_FAILURES = 10
"""How often in a row a process may end sooner."""


class NodeProcess:
    """Runs one process. Whatever ends the keeper ends the process with all that it started, `kill -9` included."""

    def __init__(self) -> None:
        self._process: SupervisedProcess | None = None
        self._starting, self._stopped = threading.RLock(), threading.Event()

    def place(self) -> tuple[str, tuple[str, ...]]:
        """The address of the node, and the GPUs that Ray gave to this actor."""
        ray = import_module("ray")
        return ray.util.get_node_ip_address(), tuple(str(gpu) for gpu in ray.get_gpu_ids())

    def free_port(self) -> int:
        """A port of this node that is free now."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return int(listener.getsockname()[1])

    def start(self, command: Sequence[str], environment: Mapping[str, str], folder: str, log: str) -> int:
        """Starts the process in the folder, unless it was stopped before; its output is appended to the log."""
        with self._starting:
            return 0 if self._stopped.is_set() else self._start(command, environment, folder, log)

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, log: str, remove: str = ""
    ) -> int:
        words = [_find_program(command[0], folder), *command[1:]]
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **environment}
        with open(log, "ab") as file:
            process = self._process = SupervisedProcess(
                words, folder=remove, cwd=folder, env=variables, stdout=file, stderr=STDOUT
            )
        try:
            process.read_start()
        except BaseException:
            process.end(0.0)
            raise
        return process.pid

    def wait(self) -> int:
        """The exit code, once the process has ended. Runs beside the other methods."""
        process = self._process
        if process is None:
            return 0
        code = process.supervisor.wait()
        process.end(0.0)
        return code

    def keep_running(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, log: str, silent_s: float
    ) -> int:
        """Starts the process, and again after a growing delay when it fails, or hangs for `silent_s`. Returns its exit
        code once it has ended well, was stopped, or has failed too often. Runs beside the other methods."""
        failures, delay_s, code = 0, FIRST_DELAY_S, 0
        while failures < MAX_FAILURES and not self._stopped.wait(delay_s if failures else 0.0):
            started = time.monotonic()
            with self._starting:
                if self._stopped.is_set():
                    break
                place = tempfile.mkdtemp(prefix="mtrl-beat-")
                beat = Path(place) / "beat"
                self._start(command, {**environment, BEAT_VARIABLE: str(beat)}, folder, log, place)
            if not (code := self._wait_or_kill(beat, silent_s)):
                break
            is_steady = time.monotonic() - started > STEADY_S
            failures = 1 if is_steady else failures + 1
            delay_s = FIRST_DELAY_S if failures == 1 else min(2 * delay_s, LONGEST_DELAY_S)
        return code

    def _wait_or_kill(self, beat: Path, silent_s: float) -> int:
        """The exit code, once the process has ended, or was killed because its beats stayed away."""
        process, seen = self._process, None
        silent_looks = 0  # Not a clock, which goes on while the keeper is stopped.
        while process is not None and not process.wait(LOOK_S):
            before, seen = seen, read_beat(beat)
            silent_looks = silent_looks + 1 if seen == before else 0
            if silent_looks * LOOK_S > (START_S if seen is None else silent_s):
                process.send_signal(signal.SIGKILL)
        return self.wait()

    def stop(self, number: int, within_s: float) -> None:
        """Asks the process to end with a signal, and kills it if it is still there after that time."""
        with self._starting:
            self._stopped.set()
            process = self._process
        if process is not None:
            process.end(within_s, first_s=0.0, number=number)


def _find_program(word: str, folder: str) -> str:
    """The path of a program on this node."""
    if word == PYTHON:
        return sys.executable
    if word != SGLANG_PYTHON:
        return word
    ours = Path(folder) / ".sglang/bin/python"
    return os.environ.get("MTRL_SGLANG_PYTHON") or (str(ours) if os.access(ours, os.X_OK) else sys.executable)
