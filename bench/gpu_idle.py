"""Samples what nvidia-smi says of the GPU while a block runs: which share of it the GPU was idle, and memory used."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Self

INTERVAL_MS = 200
QUERY = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={INTERVAL_MS}")


class GpuIdleMeter:
    """A context manager that measures its block."""

    def __init__(self) -> None:
        self._utilization: list[float] = []
        self._process: subprocess.Popen[str] | None = None

    @property
    def idle_share(self) -> float | None:
        """None without a GPU."""
        if not self._utilization:
            return None
        return round(1 - sum(self._utilization) / len(self._utilization) / 100, 3)

    def __enter__(self) -> Self:
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(["nvidia-smi", *QUERY], stdout=subprocess.PIPE, text=True)
            Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if line.strip().isdigit():
                self._utilization.append(float(line))


@contextmanager
def read_used_memory() -> Iterator[list[int]]:
    """The bytes in use on the card, sampled while the block runs; none without a GPU."""
    samples: list[int] = []
    if not shutil.which("nvidia-smi"):
        yield samples
        return
    query = ("--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--loop-ms={INTERVAL_MS}")
    with subprocess.Popen(["nvidia-smi", *query], stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            samples.extend(int(line) * 2**20 for line in process.stdout or () if line.strip().isdigit())

        thread = Thread(target=read, daemon=True)
        thread.start()
        yield samples
        process.kill()
        thread.join(timeout=5)
