"""Groups at their own pace, and what becomes of one that lost a rollout."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import anyio
import pytest

from tests.trainer.crowd import Doors, house, knocks
from tests.trainer.scripts import by_task, calling, tasks
from trainer.config import GroupRules
from trainer.engine.base import EngineError, Sampling
from trainer.engine.scripted import Answer, Script
from trainer.run.rollout import StopReason
from trainer.steps import ToolsAndFeedback, Turn


async def test_a_group_comes_out_when_it_is_done_and_not_when_it_is_its_turn() -> None:
    doors = Doors()
    async with (
        house({"slow": knocks("slow"), "quick": ("done",)}, doors.knock) as at,
        at.groups(2).play(tasks("slow", "quick")) as done,
    ):
        first = await anext(done)
        doors.door("slow").set()
        second = await anext(done)
        with pytest.raises(StopAsyncIteration):
            await anext(done)
    assert (first.task.id, second.task.id) == ("quick", "slow")
    assert [rollout.index for rollout in second.rollouts] == [0, 1]
    assert {rollout.group for rollout in first.rollouts} == {"1"}


async def test_groups_played_again_under_another_name_are_sampled_with_other_seeds() -> None:
    async with house({"*": ("done",)}) as at:
        groups = at.groups(2)
        for name in ("", "12-"):
            async with groups.play(tasks("t", "t"), name) as done:
                assert {rollout.group async for group in done for rollout in group.rollouts} == {f"{name}0", f"{name}1"}
    assert set(at.keys[4:]) == {"12-0/t/0", "12-0/t/1", "12-1/t/0", "12-1/t/1"}
    assert len({asked.sampling.seed for asked in at.engine.asked}) == 8


def failing(times: int, error: str = "out of memory") -> Script:
    """The engine fails the first rollout of each group so many times; what it then writes is right."""
    right = by_task({"*": ("It is #### 7",)})

    def script(ids: Any, sampling: Sampling, key: str) -> Answer:
        index, _, attempt = key.rpartition("/")[2].partition(".")
        return EngineError(error) if index == "0" and int(attempt or 0) < times else right(ids, sampling, key)

    return script


async def test_a_rollout_that_infrastructure_failed_is_made_anew_with_another_seed_and_counted() -> None:
    async with house(failing(1)) as at:
        (group,) = await at.all(tasks("t", truth="7"), 3)
    assert [(rollout.index, rollout.stop) for rollout in group.rollouts] == [
        (index, StopReason.FEEDBACK_DONE) for index in range(3)
    ]
    assert group.fate == "whole" and at.counts.seen().refilled == 1
    (failed,) = group.failed
    assert (failed.index, failed.stop, failed.reason) == (0, StopReason.ENGINE_FAILED, "out of memory")
    assert failed.reward is None and {rollout.reward for rollout in group.rollouts} == {1.0}
    assert len({asked.sampling.seed for asked in at.engine.asked}) == 4
    assert len(at.kept) == 4 and failed in at.kept


@pytest.mark.parametrize(
    ("rules", "counted", "failed", "dropped"),
    [
        (GroupRules(on_failure="refill", refills=2), 2, 3, False),
        (GroupRules(on_failure="rest"), 2, 1, False),
        (GroupRules(on_failure="drop"), 0, 1, True),
    ],
)
async def test_a_group_that_lost_a_rollout_goes_by_its_rules(
    rules: GroupRules, counted: int, failed: int, dropped: bool
) -> None:
    async with house(failing(99)) as at:
        (group,) = await at.all(tasks("t", truth="7"), 3, rules=rules)
    assert (len(group.rollouts), len(group.failed), group.dropped) == (counted, failed, dropped)
    assert (group.lost, group.fate) == (1, "dropped" if dropped else "short")
    assert all(rollout.rewards == {} and rollout.stop.infrastructure for rollout in group.failed)
    assert not any(rollout.stop.infrastructure for rollout in group.rollouts)
    assert len(at.kept) == failed + 2, "what does not count is kept too"


@pytest.mark.parametrize("rule", ["refill", "rest", "drop"])
async def test_of_a_group_that_lost_all_nothing_counts(rule: Any) -> None:
    def script(ids: Any, sampling: Sampling, key: str) -> Answer:
        return EngineError("gone")

    async with house(script) as at:
        (group,) = await at.all(tasks("t"), 2, rules=GroupRules(on_failure=rule, refills=1))
    assert group.fate == "dropped" and group.rollouts == () and len(group.failed) == (4 if rule == "refill" else 2)


async def test_a_policy_that_does_badly_is_no_failure_of_its_group() -> None:
    async with house({"t": (calling(("nope", {})),) * 9}) as at:
        (group,) = await at.all(tasks("t"), 2)
    assert {rollout.stop for rollout in group.rollouts} == {StopReason.INVALID_CALLS}
    assert group.failed == () and at.counts.seen().refilled == 0


async def test_a_plug_in_that_raises_in_one_rollout_leaves_the_others_alone() -> None:
    class Trips(ToolsAndFeedback):
        def check_finished(self, turn: Turn) -> Any:
            if turn.task.id == "b":
                raise KeyError("no such thing")
            return super().check_finished(turn)

    async with house({"*": ("done",)}, stepper=Trips()) as at:
        done = await at.all(tasks("a", "b", "c"), 2, rules=GroupRules(on_failure="rest"))
    lost = {group.task.id: [rollout.reason for rollout in group.failed] for group in done}
    assert lost == {"a": [], "b": ["KeyError: 'no such thing'"] * 2, "c": []}


async def test_leaving_the_block_cancels_all_calls_and_closes_all_sessions() -> None:
    doors = Doors()
    async with house({"hangs": knocks("hangs"), "*": ("done",)}, doors.knock) as at:
        at.engine.hold("2/writes/0")
        async with at.groups(1, open=4).play(tasks("hangs", "quick", "writes", "hangs", "hangs", "late")) as done:
            assert (await anext(done)).task.id == "quick"
            await anyio.wait_all_tasks_blocked()
            assert len(at.gateway.sessions) == 4
        assert not at.gateway.sessions and at.engine.writing == 0
    assert doors.cancelled["hangs"] == 3 and at.engine.cancelled == 1
    assert "5/late/0" not in at.keys and [rollout.task for rollout in at.kept] == ["quick"]


async def test_a_mistake_in_the_block_cancels_all_and_comes_out_of_it() -> None:
    doors = Doors()
    async with house({"t": knocks("t")}, doors.knock) as at:
        with pytest.raises(BaseExceptionGroup) as raised:
            async with at.groups(2).play(tasks("t")):
                await anyio.wait_all_tasks_blocked()
                raise LookupError("in the block")
    assert raised.group_contains(LookupError, match="in the block") and doors.cancelled["t"] == 2


async def test_hundreds_of_rollouts_with_tools_of_any_pace_are_each_played_once() -> None:
    pace = Random(0)

    async def work(step: int) -> int:
        """Takes a moment."""
        await anyio.sleep(pace.random() / 200)
        if pace.random() < 0.05:
            raise ConnectionResetError("the line is dead")
        return step

    texts = (*(calling(*[("work", {"step": step})] * (1 + step % 2)) for step in range(3)), "It is #### 7")
    names = [f"t{number}" for number in range(60)]
    async with house({"*": texts}, work) as at:
        done = await at.all(tasks(*names, truth="7"), 5, open=120, writing=16)
    seen = at.counts.seen()
    assert sorted(group.task.id for group in done) == sorted(names)
    for group in done:
        indices = [rollout.index for rollout in group.rollouts]
        assert indices == sorted(set(indices)) and {rollout.task for rollout in group.rollouts} == {group.task.id}
        lost = Counter(rollout.index for rollout in group.failed)
        assert all(times == (3 if index not in indices else lost[index]) for index, times in lost.items())
    failed = sum(len(group.failed) for group in done)
    counted = sum(len(group.rollouts) for group in done)
    assert failed and seen.refilled == len(at.kept) - 300 and len(at.kept) == counted + failed
    assert seen.ended == 300 and not any(seen.states.values()) and at.engine.most <= 16
    assert all(rollout.rewards == {"feedback": 1.0} for group in done for rollout in group.rollouts)
    assert all(len(rollout.ledger.turns) == 4 for group in done for rollout in group.rollouts)
