"""The bounds of asynchronous rollouts hold over all rollout workers together: staleness, open groups, admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from mtrl_plugins.workers.worker_link import Assignment
from mtrl_plugins.workers.worker_pool import WorkerPool
from tests.plugins.workers.pools import GatedEngine, make_pool, make_runner, tasks, write_tools
from tests.trainer.train.jobs import SMALL
from tests.waiting import wait_until
from trainer.data.curriculum import Curriculum, TaskStream
from trainer.engine.base import Generation, Sampling
from trainer.reward.scorer import Scorer
from trainer.rollout.rollout import Rollout
from trainer.train.collect import StepCollector, StepRollouts
from trainer.train.modes import AsyncRollouts
from trainer.train.settings import TrainSettings

pytestmark = pytest.mark.anyio
LONG_S = 150.0
"""Within which workers start, also on a busy machine."""
NAMES = [f"safe-{number:02}" for number in range(20)]
ORDER = [task.id for task in islice(TaskStream(Curriculum(), {None: tasks(*NAMES)}), len(NAMES))]
REWARDS = Path(__file__).parents[2] / "trainer/train/sevenths.py"
PROMPTS, STEPS, OPEN, WRITING = 2, 4, 7, 5
SETTINGS = {
    "mode": "asynchronous", "prompts": PROMPTS, "n": 2, "steps": STEPS, "max_staleness": 1,
    "concurrency": {"inflight_rollouts": OPEN, "running_requests": WRITING},
    "reward": {"components": {"sevenths": {"function": f"{REWARDS}:async_sevenths"}}},
}  # fmt: skip


class CountedEngine(GatedEngine):
    """Counts the requests under way."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way = self.most_under_way = 0

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
        self._play, self.pool = pool.play, pool
        self.rollouts = self.most_rollouts = 0
        monkeypatch.setattr(pool, "play", self._count)

    async def _count(self, assignment: Assignment) -> Rollout:
        self.rollouts += 1
        self.most_rollouts = max(self.most_rollouts, self.rollouts)
        try:
            return await self._play(assignment)
        finally:
            self.rollouts -= 1

    @property
    def workers_with_turns(self) -> int:
        return sum(name.startswith("workers/turn_s/") for name in self.pool.take_metrics())


class AsyncRun:
    """Steps that take rollouts of two workers, and publish a version each."""

    def __init__(self, folder: Path, engine: CountedEngine, pool: WorkerPool) -> None:
        settings = TrainSettings.model_validate(SMALL | SETTINGS)
        self.engine, self.version = engine, 0
        self.stream = TaskStream(Curriculum(), {None: tasks(*NAMES)})
        runner, scorer = make_runner(folder, engine, pool), Scorer(settings.reward)
        collector = StepCollector(runner, scorer, settings, lambda _: None)
        self.source = AsyncRollouts(collector, self.stream, lambda: self.version)

    @property
    def drawn(self) -> int:
        """Groups that were opened."""
        ((_, count),) = self.stream.position["drawn"]
        return int(count)

    async def wait_for(self, *names: str) -> None:
        """Until the groups of these tasks are finished, and what may be opened then is open."""
        await wait_until(lambda: {*names} <= {*self._finished}, LONG_S)
        await wait_all_tasks_blocked()

    async def take(self) -> StepRollouts:
        taken = await self.source.take(self.version + 1)
        check_ages(taken, self.version)
        self.version += 1
        await self.engine.publish({}, self.version)
        self.source.on_published()
        return taken

    @property
    def _finished(self) -> list[str]:
        return [group.task.id for rollouts in self.source.pending for group in rollouts.replaced]


def token_ages(groups: StepRollouts, version: int) -> Counter[int]:
    """Of the tokens that a step trains on."""
    rollouts = [scored.rollout for group in groups.groups for scored in group.scored]
    versions = [sampled_by for rollout in rollouts for sampled_by in rollout.ledger.versions]
    return Counter(version - sampled_by for sampled_by in versions if sampled_by is not None)


def check_ages(taken: StepRollouts, version: int) -> None:
    """No token is older than the bound, and the metrics say how old they are."""
    ages, metrics = token_ages(taken, version), taken.staleness_metrics(version)
    assert len(taken.groups) == PROMPTS and max(ages) <= 1
    shares = {f"staleness/age_{age}": pytest.approx(count / ages.total()) for age, count in ages.items()}
    assert {name: value for name, value in metrics.items() if "/age_" in name} == shares
    assert (metrics["staleness/max"], metrics["staleness/dropped"]) == (max(ages), len(taken.dropped))


def task_ids(taken: StepRollouts) -> list[str]:
    return [group.task.id for group in taken.groups]


@asynccontextmanager
async def open_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[AsyncRun, CountedPool]]:
    engine = CountedEngine()
    engine.own_gates = {name: anyio.Event() for name in ORDER[:2]}
    async with make_pool(folder, engine, workers=2, heartbeat_timeout_s=60.0) as pool:
        await wait_until(lambda: pool.alive == 2, LONG_S)
        counted, run = CountedPool(pool, monkeypatch), AsyncRun(folder, engine, pool)
        async with run.source:
            yield run, counted


async def test_staleness_and_admission_are_bounded_over_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second group is finished when it is a version old, the first when it is two."""
    dropped, late = ORDER[:2]
    async with open_run(write_tools(tmp_path / "place"), monkeypatch) as (run, pool):
        engine = run.engine
        await wait_until(lambda: (pool.rollouts, engine.at_gate.total()) == (OPEN, WRITING), LONG_S)
        assert pool.workers_with_turns == 2
        engine.gate.set()
        await run.wait_for(*ORDER[2:4])
        assert run.drawn == 4, "more would be too old for the steps that can take them"
        assert task_ids(await run.take()) == ORDER[2:4]
        await run.wait_for(*ORDER[4:6])
        engine.own_gates[late].set()
        await run.wait_for(late)
        assert run.drawn == 6
        second = await run.take()
        assert task_ids(second) == [late, ORDER[4]] and second.staleness_metrics(1)["staleness/max"] == 1
        engine.own_gates[dropped].set()
        await run.wait_for(dropped, *ORDER[6:8])
        assert run.drawn == 8
        third = await run.take()
        assert [group.task.id for group in third.dropped] == [dropped] and task_ids(third) == ORDER[5:7]
        assert task_ids(await run.take()) == ORDER[7:9] and run.drawn == 9, "as many as the last step has, and no more"
    assert (pool.most_rollouts, engine.most_under_way) == (OPEN, WRITING)
