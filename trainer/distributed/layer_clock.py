"""Measures how long a rank computes, without its waits for others: in the decoder layers of its forward passes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class LayerClock:
    """The clock of one rank. A layer's weights are gathered before it starts, so that waiting for them is left out."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._busy_s, self._started = device, 0.0, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """On a GPU: the start and the end of each layer, which are read once they have happened."""

    def watch(self, layer: nn.Module) -> None:
        """Measures a layer. To be called after it was split over ranks."""
        layer.register_forward_pre_hook(self._start)
        layer.register_forward_hook(self._stop, prepend=True)

    def take_busy_s(self) -> float:
        """Seconds since the last call."""
        if self._events:
            self._events[-1][1].synchronize()
            self._busy_s = sum(start.elapsed_time(end) for start, end in self._events) / 1000
        busy_s, self._busy_s, self._events = self._busy_s, 0.0, []
        return busy_s

    def _start(self, *_: Any) -> None:
        if self._device.type == "cuda":
            self._events.append((_new_event(), _new_event()))
            self._events[-1][0].record()
        else:
            self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        if self._device.type == "cuda":
            self._events[-1][1].record()
        else:
            self._busy_s += time.perf_counter() - self._started


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
