"""A torch engine with a tiny model, as a fixture, and a gate that blocks its steps."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import anyio
import pytest

from tests.trainer import tiny_models
from trainer.engine.base import Sampling
from trainer.engine.torch.continuous_batch import ContinuousBatch
from trainer.engine.torch.torch_engine import TorchEngine

LONG, SHORT = (Sampling(max_tokens=tokens, temperature=0) for tokens in (500, 6))


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    with anyio.fail_after(60):
        async with TorchEngine(tiny_models.load_model()) as engine:
            yield engine


class StepGate:
    """Blocks the engine's steps after this many, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self._steps_left, self._is_open, self.reached = steps, threading.Event(), anyio.Event()
        self.sequence_counts: list[int] = []
        token, step = anyio.lowlevel.current_token(), ContinuousBatch._step

        def gated_step(batch: ContinuousBatch) -> list[object]:
            if self._steps_left == 0:
                anyio.from_thread.run_sync(self.reached.set, token=token)
                assert self._is_open.wait(30)
            self._steps_left -= 1
            self.sequence_counts.append(len(batch.sequences))
            return step(batch)

        monkeypatch.setattr(ContinuousBatch, "_step", gated_step)

    def open(self) -> None:
        self._is_open.set()
