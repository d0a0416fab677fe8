"""`mtrl-train` with an engine and updates that keep a set pace, so that a busy machine hardly changes a step's time.

The rollout loop, admission, tools, modes, scoring and weights are the real ones; a tiny model samples the tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402
import torch  # noqa: E402

from trainer.algorithms.train_batch import TrainBatch  # noqa: E402
from trainer.cli import main  # noqa: E402
from trainer.engine.base import Generation, Sampling  # noqa: E402
from trainer.engine.torch import torch_engine  # noqa: E402
from trainer.policy.update import PolicyUpdater  # noqa: E402

DECODE_S, SEQUENCE_S = 0.03, 0.0015
"""Seconds of a decode step, and more for each running sequence."""
UPDATE_S, TOKEN_S = 0.15, 0.0006
"""Seconds of an update's optimizer step, and more for each token of its rows."""
PUBLISH_S = 0.05


class PacedEngine(torch_engine.TorchEngine):
    """Delivers a turn when as many steps have passed as it has tokens."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._left: dict[anyio.Event, int] = {}
        self._has_turns, self._is_publishing = anyio.Event(), False
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._keep_pace)
        return self

    async def generate(self, ids: Sequence[int], sampling: Sampling, **more: Any) -> Generation:
        generation = await super().generate(ids, sampling, **more)
        done = anyio.Event()
        self._left[done] = max(1, len(generation.ids))
        self._has_turns.set()
        await done.wait()
        return generation

    async def publish(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        await anyio.sleep(PUBLISH_S)
        await super().publish(weights, version)

    async def _keep_pace(self) -> None:
        deadline = anyio.current_time()
        while True:
            if not self._left:
                self._has_turns = anyio.Event()
                await self._has_turns.wait()
                deadline = anyio.current_time()
            deadline += DECODE_S + SEQUENCE_S * len(self._left)
            await anyio.sleep_until(deadline)
            for done in [*self._left]:
                self._left[done] -= 1
                if not self._left[done]:
                    del self._left[done]
                    done.set()


def pace_updates() -> None:
    """Makes updates take the set time in all, of their own included."""
    train_step = PolicyUpdater.train_step

    def paced(self: PolicyUpdater, batch: TrainBatch) -> dict[str, float]:
        deadline = time.monotonic()
        metrics = train_step(self, batch)
        if rows := self.last_trained:
            update = self._policy.settings
            tokens = update.epochs * sum(len(row.ids) for row in rows)
            deadline += update.epochs * update.minibatches * UPDATE_S + tokens * TOKEN_S
        time.sleep(max(0.0, deadline - time.monotonic()))
        return metrics

    PolicyUpdater.train_step = paced  # type: ignore[method-assign]


if __name__ == "__main__":
    torch_engine.TorchEngine = PacedEngine  # type: ignore[misc]
    pace_updates()
    main()
