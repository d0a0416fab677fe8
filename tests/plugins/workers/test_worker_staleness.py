"""The bounds of asynchronous rollouts hold over all rollout workers together: staleness, open groups, admission."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from mtrl_plugins.workers.worker_link import Assignment
from mtrl_plugins.workers.worker_pool import WorkerPool
from tests.plugins.workers.pools import GatedEngine, make_pool, make_runner, tasks, write_tools
from tests.trainer.train.jobs import SMALL
from tests.waiting import wait_until
from trainer.data.curriculum import Curriculum, TaskStream
from trainer.engine.base import Generation, Sampling
from trainer.reward.scorer import Scorer
from trainer.rollout.rollout import Rollout
from trainer.train.collect import StepCollector
from trainer.train.modes import AsyncRollouts
from trainer.train.settings import TrainSettings

LONG_S = 150.0
"""Within which workers start, also on a busy machine."""
REWARDS = Path(__file__).parents[2] / "trainer/train/sevenths.py"
PROMPTS, STEPS, OPEN, WRITING = 2, 4, 7, 5
SETTINGS = {
    "mode": "asynchronous", "prompts": PROMPTS, "n": 2, "steps": STEPS, "max_staleness": 1,
    "concurrency": {"inflight_rollouts": OPEN, "running_requests": WRITING},
    "reward": {"components": {"sevenths": {"function": f"{REWARDS}:async_sevenths"}}},
}  # fmt: skip


class CountedEngine(GatedEngine):
    """Counts the requests under way."""

    under_way = most_under_way = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling, *, key: str = "", **more: Any) -> Generation:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await super().generate(ids, sampling, key=key, **more)
        finally:
            self.under_way -= 1


class CountedPool:
    """Counts the rollouts that workers play."""

    def __init__(self, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self._play = pool.play
        self.rollouts = self.most_rollouts = 0
        monkeypatch.setattr(pool, "play", self._count)

    async def _count(self, assignment: Assignment) -> Rollout:
        self.rollouts += 1
        self.most_rollouts = max(self.most_rollouts, self.rollouts)
        try:
            return await self._play(assignment)
        finally:
            self.rollouts -= 1


async def test_staleness_and_admission_are_bounded_over_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, engine, version = write_tools(tmp_path / "place"), CountedEngine(), 0
    async with make_pool(folder, engine, workers=2, heartbeat_timeout_s=60.0) as pool:
        await wait_until(lambda: pool.alive == 2, LONG_S)
        settings, counted = TrainSettings.model_validate(SMALL | SETTINGS), CountedPool(pool, monkeypatch)
        collector = StepCollector(make_runner(folder, engine, pool), Scorer(settings.reward), settings, lambda _: None)
        stream = TaskStream(Curriculum(), {None: tasks(*(f"safe-{number:02}" for number in range(20)))})
        async with AsyncRollouts(collector, stream, lambda: version) as source:
            await wait_until(lambda: (counted.rollouts, engine.at_gate.total()) == (OPEN, WRITING), LONG_S)
            assert sum(name.startswith("workers/turn_s/") for name in pool.take_metrics()) == 2
            engine.gate.set()
            dropped = 0
            while version < STEPS:
                with anyio.fail_after(LONG_S):
                    taken = await source.take(version + 1)
                rollouts = [scored.rollout for group in taken.groups for scored in group.scored]
                versions = {sampled_by for rollout in rollouts for sampled_by in rollout.ledger.versions} - {None}
                assert len(taken.groups) == PROMPTS and min(versions) >= version - 1
                assert taken.staleness_metrics(version)["staleness/max"] == version - min(versions)
                dropped += len(taken.dropped)  # On a machine that stands still; others are drawn for them.
                version += 1
                await engine.publish({}, version)
                source.on_published()
            ((_, drawn),) = stream.position["drawn"]
    assert drawn == PROMPTS * STEPS + dropped, "as many as the last step has, and no more"
    assert (counted.most_rollouts, engine.most_under_way) == (OPEN, WRITING)
