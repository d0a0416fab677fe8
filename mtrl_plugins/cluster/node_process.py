"""A process on a node of a Ray cluster: a rank or a server, started, watched and ended with its actor.

Ray's workers import this, so it needs little beyond the standard library.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from subprocess import STDOUT

from gateway.process.supervised_process import SupervisedProcess

PYTHON = "python"
"""Stands for the Python of the node's Ray as the first word of a command."""
SGLANG_PYTHON = "sglang-python"
"""Stands for the Python of the node that has SGLang."""


class NodeProcess:
    """Runs one process. Whatever ends the keeper ends the process with all that it started, `kill -9` included."""

    def __init__(self) -> None:
        self._process: SupervisedProcess | None = None
        self._starting, self._stopped = threading.Lock(), threading.Event()

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
            if self._stopped.is_set():
                return 0
            words = [_find_program(command[0], folder), *command[1:]]
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            variables = {**os.environ, **environment}
            with open(log, "ab") as file:
                process = self._process = SupervisedProcess(
                    words, cwd=folder, env=variables, stdout=file, stderr=STDOUT
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
