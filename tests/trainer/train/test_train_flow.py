"""Groups that flow: no more are begun than can be used, the oldest are taken first, and what is too old is not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from tests.trainer.crowd import Doors, House, house, knocks
from tests.trainer.scripts import tasks
from tests.trainer.train.jobs import SMALL
from trainer.data.curriculum import Course, Curriculum
from trainer.reward.scorer import Scorer
from trainer.run.rollout import StopReason
from trainer.train.flow import Flow
from trainer.train.rolling import Rolled, Roller
from trainer.train.settings import TrainSettings

SEVENTHS = {"components": {"sevenths": {"function": f"{Path(__file__).parent}/sevenths.py:at_once"}}}
NAMES = [f"t{place:02}" for place in range(40)]


class Run:
    """A flow, and the version of the weights."""

    def __init__(self, at: House, doors: Doors, **settings: Any) -> None:
        chosen = {
            "reward": SEVENTHS,
            "mode": "asynchronous",
            "prompts": 2,
            "n": 2,
            "steps": 6,
            "max_staleness": 1,
        } | settings
        self.settings, self.at = TrainSettings.model_validate(SMALL | chosen), at
        self.doors, self.version = doors, 0
        self.course = Course(Curriculum(), {None: tasks(*NAMES)})
        roller = Roller(at.player, Scorer(self.settings.reward), self.settings, lambda _: None)
        self.flow = Flow(roller, self.course, lambda: self.version)

    @property
    def begun(self) -> list[str]:
        """Tasks, in order."""
        return list(dict.fromkeys(key.split("/")[1] for key in self.at.keys))

    async def settled(self) -> None:
        """Until all that is open is over, but for those that stand at a door which is shut."""
        with anyio.fail_after(20):
            while not all(
                name in {one.name for one in self.flow._over}
                or (draw.task.id in self.begun and not self.doors.door(draw.task.id).is_set())
                for name, draw in self.flow._draws.items()
            ):
                await anyio.sleep(0.005)
                await wait_all_tasks_blocked()

    async def take(self) -> Rolled:
        """And new weights after it, as a step does."""
        await self.settled()
        taken = await self.flow.take(self.version + 1)
        await self.at.engine.publish({}, self.version + 1)
        self.version += 1
        self.course.settle(taken.draws)
        self.flow.published()
        await wait_all_tasks_blocked()
        await self.settled()
        return taken


@asynccontextmanager
async def flowing(doors: Doors, slow: Callable[[str], bool] = lambda _: False, **settings: Any) -> AsyncIterator[Run]:
    """Each task knocks at its own door; all but slow ones' are open."""
    async with house({name: knocks(name) for name in NAMES}, doors.knock) as at:
        run = Run(at, doors, **settings)
        for name in NAMES:
            if not slow(name):
                doors.door(name).set()
        async with run.flow:
            await wait_all_tasks_blocked()
            await run.settled()
            yield run


def first(course: Course, count: int) -> list[str]:
    return [course.draw().task.id for _ in range(count)]


def order(count: int) -> list[str]:
    return first(Course(Curriculum(), {None: tasks(*NAMES)}), count)


def of(taken: Rolled) -> list[str]:
    return [group.task.id for group in taken.groups]


async def test_no_more_groups_are_begun_than_steps_can_have_before_they_are_too_stale() -> None:
    async with flowing(Doors()) as run:
        assert run.begun == order(4)
        assert of(await run.take()) == order(2)
        assert run.begun == order(6) and run.course.position["drawn"] == [[None, 6]]
        for _ in range(4):
            await run.take()
        assert run.begun == order(12)  # The last step's, and nothing that no step would have.
        assert of(await run.take()) == order(12)[10:] and run.course.position["open"] == []


async def test_a_slow_group_keeps_nobody_waiting_and_is_dropped_and_counted_once_it_is_too_old() -> None:
    doors, slow = Doors(), order(1)[0]
    async with flowing(doors, lambda name: name == slow) as run:
        assert [of(await run.take()) for _ in range(2)] == [order(5)[1:3], order(5)[3:]]
        doors.door(slow).set()
        await wait_all_tasks_blocked()
        taken = await run.take()
    assert [group.task.id for group in taken.dropped] == [slow] and slow not in of(taken)
    assert len(taken.groups) == 2 and taken.staleness(2)["staleness/dropped"] == 1
    kept = [one for one in taken.rollouts if one.task == slow]
    assert len(kept) == 2 and all(one.step is None and one.rewards for one in kept)
    assert {one.step for one in taken.rollouts if one.task != slow} == {3}


async def test_a_group_whose_oldest_token_is_as_old_as_may_be_is_learned_from_and_its_ages_are_told() -> None:
    doors, slow = Doors(), order(1)[0]
    async with flowing(doors, lambda name: name == slow, max_staleness=2) as run:
        for _ in range(2):
            await run.take()
        doors.door(slow).set()
        await wait_all_tasks_blocked()
        mine = await run.take()
    assert slow in of(mine)
    rollout = next(one for one in mine.rollouts if one.task == slow)
    asked, answered = rollout.turns
    assert (asked.version, answered.version) == (0, 2)  # The call, and what was made of its answer.
    told = mine.staleness(2)
    assert told["staleness/max"] == 2 and not mine.dropped and 0 < told["staleness/age_2"] < 1
    assert sum(share for name, share in told.items() if "/age_" in name) == pytest.approx(1)


async def test_what_is_under_way_when_a_run_ends_is_drawn_again_and_what_was_over_can_be_read() -> None:
    doors, (slow, quick) = Doors(), order(2)
    async with flowing(doors, lambda name: name == slow) as run:
        await run.take()
        untaken = [one for rolled in run.flow.untaken for one in rolled.rollouts]
        position = run.course.position
    assert {one.task for one in untaken} == {*order(6)[3:]} and quick not in {one.task for one in untaken}
    again = Course(Curriculum(), {None: tasks(*NAMES)})
    again.resume(position)
    assert first(again, 5) == [slow, *order(6)[3:], order(7)[6]]


async def test_where_infrastructure_ends_a_group_the_step_goes_on_with_fewer() -> None:
    doors, lost = Doors(), order(1)[0]
    async with house({name: knocks(name) for name in NAMES if name != lost}, doors.knock) as at:
        run = Run(at, doors, groups={"on_failure": "drop"})
        for name in NAMES:
            doors.door(name).set()
        async with run.flow:
            await wait_all_tasks_blocked()
            taken = await run.take()
    assert of(taken) == [order(2)[1]] and {one.stop for one in taken.rollouts if one.task == lost} == {StopReason.ERROR}
    assert sum(taken.reasons.values()) == 2


async def test_how_long_nothing_was_under_way_is_told() -> None:
    doors = Doors()
    async with flowing(doors) as run:
        before = anyio.current_time()
        while anyio.current_time() - before < 0.02:
            await anyio.lowlevel.checkpoint()
        assert (await run.take()).waited_s >= 0.02
