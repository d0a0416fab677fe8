"""Asynchronous rollouts: admission, order, staleness and resuming of groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tests.trainer.policy_scripts import make_tasks
from tests.trainer.rollout_harness import BlockingTool, RolloutHarness, blocking_turns, open_harness
from tests.trainer.train.jobs import SMALL
from tests.waiting import PATIENCE_S
from trainer.data.curriculum import Curriculum, TaskStream
from trainer.reward.scorer import Scorer
from trainer.rollout.rollout import StopReason
from trainer.train.collect import StepCollector, StepRollouts
from trainer.train.modes import AsyncRollouts
from trainer.train.settings import TrainSettings

SEVENTHS = {"components": {"sevenths": {"function": f"{Path(__file__).parent}/sevenths.py:async_sevenths"}}}
NAMES = [f"t{place:02}" for place in range(40)]


class QueueRun:
    """A source, and the version of the weights."""

    def __init__(self, at: RolloutHarness, tool: BlockingTool, **settings: Any) -> None:
        chosen = {
            "reward": SEVENTHS,
            "mode": "asynchronous",
            "prompts": 2,
            "n": 2,
            "steps": 6,
            "max_staleness": 1,
        } | settings
        self.settings, self.at = TrainSettings.model_validate(SMALL | chosen), at
        self.tool, self.version = tool, 0
        self.stream = TaskStream(Curriculum(), {None: make_tasks(*NAMES)})
        collector = StepCollector(at.runner, Scorer(self.settings.reward), self.settings, lambda _: None)
        self.source = AsyncRollouts(collector, self.stream, lambda: self.version)

    @property
    def started(self) -> list[str]:
        """Tasks, in order."""
        return list(dict.fromkeys(key.split("/")[1] for key in self.at.request_keys))

    async def wait_until_settled(self) -> None:
        """Until all that is open is over, but for those that stand at a door which is shut."""
        with anyio.fail_after(PATIENCE_S):
            while not all(
                name in {one.name for one in self.source._queue}
                or (draw.task.id in self.started and not self.tool.event(draw.task.id).is_set())
                for name, draw in self.source._draws.items()
            ):
                await anyio.sleep(0.005)
                await wait_all_tasks_blocked()

    async def take(self) -> StepRollouts:
        """And new weights after it, as a step does."""
        await self.wait_until_settled()
        taken = await self.source.take(self.version + 1)
        await self.at.engine.publish({}, self.version + 1)
        self.version += 1
        self.stream.mark_done(taken.draws)
        self.source.on_published()
        await wait_all_tasks_blocked()
        await self.wait_until_settled()
        return taken


@asynccontextmanager
async def open_queue(
    tool: BlockingTool, slow: Callable[[str], bool] = lambda _: False, **settings: Any
) -> AsyncIterator[QueueRun]:
    """Each task knocks at its own door; all but slow ones' are open."""
    async with open_harness({name: blocking_turns(name) for name in NAMES}, tool.block) as at:
        run = QueueRun(at, tool, **settings)
        for name in NAMES:
            if not slow(name):
                tool.event(name).set()
        async with run.source:
            await wait_all_tasks_blocked()
            await run.wait_until_settled()
            yield run


def draw_ids(stream: TaskStream, count: int) -> list[str]:
    return [stream.draw().task.id for _ in range(count)]


def task_order(count: int) -> list[str]:
    return draw_ids(TaskStream(Curriculum(), {None: make_tasks(*NAMES)}), count)


def task_ids(taken: StepRollouts) -> list[str]:
    return [group.task.id for group in taken.groups]


async def test_groups_are_not_started_when_they_would_become_too_stale() -> None:
    async with open_queue(BlockingTool()) as run:
        assert run.started == task_order(4)
        assert task_ids(await run.take()) == task_order(2)
        assert run.started == task_order(6) and run.stream.position["drawn"] == [[None, 6]]
        for _ in range(4):
            await run.take()
        assert run.started == task_order(12)  # The last step's, and nothing that no step would have.
        assert task_ids(await run.take()) == task_order(12)[10:] and run.stream.position["open"] == []


async def test_slow_group_delays_nobody_and_is_dropped_when_too_stale() -> None:
    tool, slow = BlockingTool(), task_order(1)[0]
    async with open_queue(tool, lambda name: name == slow) as run:
        assert [task_ids(await run.take()) for _ in range(2)] == [task_order(5)[1:3], task_order(5)[3:]]
        tool.event(slow).set()
        await wait_all_tasks_blocked()
        taken = await run.take()
    assert [group.task.id for group in taken.dropped] == [slow] and slow not in task_ids(taken)
    assert len(taken.groups) == 2 and taken.staleness_metrics(2)["staleness/dropped"] == 1
    assert taken.metrics(2)["rollout/cut/task"] == 2, "what was cut is counted by the kind of task"
    kept = [one for one in taken.rollouts if one.task == slow]
    assert len(kept) == 2 and all(one.step is None and one.rewards for one in kept)
    assert {one.step for one in taken.rollouts if one.task != slow} == {3}


async def test_group_at_the_staleness_limit_is_trained_and_its_ages_are_metrics() -> None:
    tool, slow = BlockingTool(), task_order(1)[0]
    async with open_queue(tool, lambda name: name == slow, max_staleness=2) as run:
        for _ in range(2):
            await run.take()
        tool.event(slow).set()
        await wait_all_tasks_blocked()
        mine = await run.take()
    assert slow in task_ids(mine)
    rollout = next(one for one in mine.rollouts if one.task == slow)
    asked, answered = rollout.turns
    assert (asked.version, answered.version) == (0, 2)  # The call, and what was made of its answer.
    metrics = mine.staleness_metrics(2)
    assert metrics["staleness/max"] == 2 and not mine.dropped and 0 < metrics["staleness/age_2"] < 1
    assert sum(share for name, share in metrics.items() if "/age_" in name) == pytest.approx(1)


async def test_unfinished_groups_are_drawn_again_after_a_stop_and_finished_rollouts_are_kept() -> None:
    tool, (slow, quick) = BlockingTool(), task_order(2)
    async with open_queue(tool, lambda name: name == slow) as run:
        await run.take()
        pending = [one for rolled in run.source.pending for one in rolled.rollouts]
        position = run.stream.position
    assert {one.task for one in pending} == {*task_order(6)[3:]} and quick not in {one.task for one in pending}
    again = TaskStream(Curriculum(), {None: make_tasks(*NAMES)})
    again.restore(position)
    assert draw_ids(again, 5) == [slow, *task_order(6)[3:], task_order(7)[6]]


async def test_step_continues_with_fewer_groups_after_an_infrastructure_failure() -> None:
    tool, lost = BlockingTool(), task_order(1)[0]
    async with open_harness({name: blocking_turns(name) for name in NAMES if name != lost}, tool.block) as at:
        run = QueueRun(at, tool, max_retries=0)
        for name in NAMES:
            tool.event(name).set()
        async with run.source:
            await wait_all_tasks_blocked()
            taken = await run.take()
    assert task_ids(taken) == [task_order(2)[1]] and {one.stop for one in taken.rollouts if one.task == lost} == {
        StopReason.ERROR
    }
    metrics = taken.metrics(2)
    assert metrics["rollout/lost"] == metrics["lost/error"] == 2
