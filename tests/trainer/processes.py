"""The trainer as another process: started, waited for, and surely ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 120
LOOK_S = 0.005


@contextmanager
def started(place: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`python WORDS` with `place` as its folder."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=place,
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


def until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Looks again and again, for as long as the process lives and the time lasts."""
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=5)[0]
        time.sleep(LOOK_S)
