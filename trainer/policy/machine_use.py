"""What a run uses of its machine between two steps: processors, memory and GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Self

import torch

from trainer.policy.process_memory import peak_memory, reset_peak_memory, resident_memory

SAMPLE_S = 1.0
"""Seconds between two looks at the GPUs."""
JOIN_S = 5.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
IDLE_FIELDS = slice(3, 5)
"""Where /proc/stat has the time in which a processor had nothing to do, or waited for a disk."""
CPU_FIELDS = 8
"""Its first fields; the rest is time of guests, which is in them already."""


class MachineUse:
    """Metrics of the machine since the step before; what cannot be measured here is left out."""

    def __init__(self) -> None:
        self._before = self._read_clocks()
        self._use: list[list[float]] = []
        self._memory: dict[int, float] = {}
        self._peaks: dict[str, float] = {}
        self._stop = Event()
        self._sampler: Thread | None = None

    def __enter__(self) -> Self:
        if torch.cuda.is_available():
            self._sampler = Thread(target=self._sample, name="gpu-use", daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._sampler is not None:
            self._sampler.join(JOIN_S)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures the most memory that a phase of a step takes, which may come again in the same step."""
        is_measured, metric = reset_peak_memory(), f"machine/peak_gb/{name}"
        yield
        if is_measured:
            self._peaks[metric] = max(self._peaks.get(metric, 0.0), peak_memory() / 1e9)

    def take_metrics(self) -> dict[str, float]:
        """The metrics since they were taken last."""
        now = self._read_clocks()
        spent, before, self._before = now[0] - self._before[0], self._before, now
        names = ("machine/cores_of_trainer", "machine/cores")
        metrics = {
            name: (value - old) / max(spent, 1e-9) for name, value, old in zip(names, now[1:], before[1:], strict=False)
        }
        if size := resident_memory():
            metrics["machine/memory_gb"] = size / 1e9
        use, self._use = self._use, []
        memory, self._memory = self._memory, {}
        peaks, self._peaks = self._peaks, {}
        metrics |= peaks
        metrics |= {f"machine/gpu_memory_gb/{device}": value for device, value in memory.items()}
        return metrics | {
            f"machine/gpu/{device}": sum(each) / len(each) for device, each in enumerate(zip(*use, strict=False))
        }

    @staticmethod
    def _read_clocks() -> Sequence[float]:
        """The time, and the processor time of this process and of the machine, in seconds."""
        own = sum(os.times()[:2])
        with suppress(OSError, ValueError):
            fields = [int(field) for field in Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:]]
            return time.monotonic(), own, (sum(fields[:CPU_FIELDS]) - sum(fields[IDLE_FIELDS])) / TICKS_PER_S
        return time.monotonic(), own

    def _sample(self) -> None:
        """Looks at the GPUs. Their use is read through NVML, where its package (nvidia-ml-py) is there."""
        devices = range(torch.cuda.device_count())
        while not self._stop.wait(SAMPLE_S):
            with suppress(RuntimeError):
                for device in filter(torch.cuda.memory_reserved, devices):  # Asking another makes a context there.
                    free, total = torch.cuda.mem_get_info(device)
                    self._memory[device] = max(self._memory.get(device, 0.0), (total - free) / 1e9)
            with suppress(Exception):  # boundary: NVML's own errors, where a device tells nothing
                self._use.append([torch.cuda.utilization(device) / 100 for device in devices])
