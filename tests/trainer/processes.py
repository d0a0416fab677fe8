"""Runs Python programs in child processes, and kills them in the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked_python import ForkedPopen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 120
POLL_S = 0.005


@contextmanager
def run_process(folder: Path, *args: str, forked: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Runs `python ARGS` in the folder; where forked, in a process that has imported the trainer already."""
    process = (ForkedPopen if forked else subprocess.Popen)(
        [sys.executable, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Polls the condition; fails if the process ends or the time is up."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        has_ended = process.poll() is not None  # Before the condition, which it may fulfil by its last act.
        if condition():
            return
        if has_ended or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate(timeout=TIMEOUT_S)[0])
        time.sleep(POLL_S)
