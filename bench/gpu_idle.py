"""How much of a time the GPU had nothing to do, by what the driver says of it several times a second."""

from __future__ import annotations

import shutil
import subprocess
from threading import Thread
from types import TracebackType
from typing import Self

EVERY_MS = 200
ASKED = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}")


class Idle:
    """A block that is looked at."""

    def __init__(self) -> None:
        self._busy: list[float] = []
        self._process: subprocess.Popen[str] | None = None

    @property
    def share(self) -> float | None:
        """None without a GPU."""
        return round(1 - sum(self._busy) / len(self._busy) / 100, 3) if self._busy else None

    def __enter__(self) -> Self:
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(["nvidia-smi", *ASKED], stdout=subprocess.PIPE, text=True)
            Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if line.strip().isdigit():
                self._busy.append(float(line))
