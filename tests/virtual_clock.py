"""An asyncio loop on a virtual clock, which jumps to the next deadline when no task can run."""

from __future__ import annotations

import asyncio
from selectors import DefaultSelector, SelectorKey
from typing import Any


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """For tests whose tasks wait for each other and for time, never for other threads or processes."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        self._now_s += seconds


class _Jumping(DefaultSelector):
    def __init__(self, loop: VirtualClockLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, Any]]:
        if timeout is None:
            return super().select(None)
        self._loop.jump(timeout)
        return super().select(0)


VIRTUAL_CLOCK = {"loop_factory": VirtualClockLoop}
"""For `backend_options` of `anyio.run`."""
