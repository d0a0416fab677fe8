"""The scheduler and admission: groups finish independently, failed rollouts are repeated, limits hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.trainer.policy_scripts import make_tasks, render_calls, script_by_task
from tests.trainer.rollout_harness import BlockingTool, blocking_turns, open_harness
from trainer.engine.base import EngineError, Sampling
from trainer.engine.scripted import Answer, Script
from trainer.rollout.admission import Admission, EngineSlots
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import ConcurrencySettings
from trainer.rollout.steppers import ToolsAndFeedback, Turn


def engine_fails_first_rollout(failures: int, error: str = "out of memory") -> Script:
    """A script: the engine fails each group's first rollout this many times; then the answer is correct."""
    correct = script_by_task({"*": ("It is #### 7",)})

    def script(ids: Any, sampling: Sampling, key: str) -> Answer:
        index, _, attempt = key.rpartition("/")[2].partition(".")
        return EngineError(error) if index == "0" and int(attempt or 0) < failures else correct(ids, sampling, key)

    return script


async def test_failed_rollout_is_repeated_with_the_same_seed_and_recorded() -> None:
    async with open_harness(engine_fails_first_rollout(1)) as harness:
        (group,) = await harness.run_all(make_tasks("t", truth="7"), 3)
    assert [(rollout.index, rollout.stop) for rollout in group.rollouts] == [
        (index, StopReason.FEEDBACK_DONE) for index in range(3)
    ]
    assert group.status == "whole" and harness.counts.snapshot().retried == 1
    (failed,) = group.failed
    assert (failed.index, failed.stop, failed.reason) == (0, StopReason.ENGINE_FAILED, "out of memory")
    assert failed.reward is None and {rollout.reward for rollout in group.rollouts} == {1.0}
    assert len({request.sampling.seed for request in harness.engine.requests}) == 3
    assert len(harness.finished) == 4 and failed in harness.finished


@pytest.mark.parametrize(("retries", "failed"), [(2, 3), (0, 1)])
async def test_a_rollout_that_keeps_failing_is_run_again_as_often_as_is_allowed(retries: int, failed: int) -> None:
    async with open_harness(engine_fails_first_rollout(99)) as harness:
        (group,) = await harness.run_all(make_tasks("t", truth="7"), 3, max_retries=retries)
    assert (len(group.rollouts), len(group.failed), group.missing, group.status) == (2, failed, 1, "short")
    assert all(rollout.rewards == {} and rollout.stop.is_infrastructure for rollout in group.failed)
    assert not any(rollout.stop.is_infrastructure for rollout in group.rollouts)
    assert len(harness.finished) == failed + 2, "failed rollouts are recorded, too"


async def test_group_is_dropped_when_all_rollouts_fail() -> None:
    def script(ids: Any, sampling: Sampling, key: str) -> Answer:
        return EngineError("gone")

    async with open_harness(script) as harness:
        (group,) = await harness.run_all(make_tasks("t"), 2, max_retries=1)
    assert group.status == "dropped" and group.rollouts == () and len(group.failed) == 4


def calls_or_avoids(avoids: Callable[[int, int], bool]) -> Script:
    """A script that calls `search`, unless `avoids` says so for an index and an attempt, and then answers."""
    calling = script_by_task({"*": (render_calls(("search", {})), "It is #### 7")})
    avoiding = script_by_task({"*": ("It is #### 7",)})

    def script(ids: Any, sampling: Sampling, key: str) -> Answer:
        index, _, attempt = key.rpartition("/")[2].partition(".")
        return (avoiding if avoids(int(index), int(attempt or 0)) else calling)(ids, sampling, key)

    return script


async def test_refill_that_avoids_the_tool_that_failed_takes_no_place() -> None:
    async def search() -> str:
        """Breaks."""
        raise ConnectionResetError("the line is dead")

    script = calls_or_avoids(lambda index, attempt: index == 1 or attempt > 0)
    async with open_harness(script, search) as harness:
        (group,) = await harness.run_all(make_tasks("t", truth="7"), 3)
    assert [rollout.index for rollout in group.rollouts] == [1], "the one that never called it"
    assert Counter(rollout.stop for rollout in group.failed) == {StopReason.TOOL_FAILED: 2, StopReason.CANCELLED: 4}
    set_aside = next(rollout for rollout in group.failed if rollout.stop is StopReason.CANCELLED)
    assert "it did without `search`" in set_aside.reason and set_aside.rewards == {}


async def test_exception_in_a_stepper_fails_only_its_own_rollouts() -> None:
    class FailingStepper(ToolsAndFeedback):
        def check_finished(self, turn: Turn) -> Any:
            if turn.task.id == "b":
                raise KeyError("no such thing")
            return super().check_finished(turn)

    async with open_harness({"*": ("done",)}, stepper=FailingStepper()) as harness:
        groups = await harness.run_all(make_tasks("a", "b", "c"), 2, max_retries=0)
    failed_reasons = {group.task.id: [rollout.reason for rollout in group.failed] for group in groups}
    assert failed_reasons == {"a": [], "b": ["KeyError: 'no such thing'"] * 2, "c": []}


async def test_leaving_the_block_cancels_all_calls_and_closes_all_sessions() -> None:
    tool = BlockingTool()
    async with open_harness({"hangs": blocking_turns("hangs"), "*": ("done",)}, tool.block) as harness:
        harness.engine.hold("2/writes/0")
        async with harness.make_scheduler(1, inflight_rollouts=4).submit(
            make_tasks("hangs", "quick", "writes", "hangs", "hangs", "late")
        ) as groups:
            assert (await anext(groups)).task.id == "quick"
            await anyio.wait_all_tasks_blocked()
            assert len(harness.gateway.sessions) == 4
        assert not harness.gateway.sessions and harness.engine.in_flight == 0
    assert tool.cancelled["hangs"] == 3 and harness.engine.cancelled == 1
    assert "5/late/0" not in harness.request_keys and [rollout.task for rollout in harness.finished] == ["quick"]


async def test_300_rollouts_with_slow_and_failing_tools_each_finish_once() -> None:
    pace = Random(0)

    async def work(step: int) -> int:
        """Takes a moment."""
        await anyio.sleep(pace.random() / 200)
        if pace.random() < 0.05:
            raise ConnectionResetError("the line is dead")
        return step

    texts = (*(render_calls(*[("work", {"step": step})] * (1 + step % 2)) for step in range(3)), "It is #### 7")
    names = [f"t{number}" for number in range(60)]
    async with open_harness({"*": texts}, work) as harness:
        groups = await harness.run_all(make_tasks(*names, truth="7"), 5, inflight_rollouts=120, running_requests=16)
    snapshot = harness.counts.snapshot()
    assert sorted(group.task.id for group in groups) == sorted(names)
    for group in groups:
        indices = [rollout.index for rollout in group.rollouts]
        assert indices == sorted(set(indices)) and {rollout.task for rollout in group.rollouts} == {group.task.id}
        failures = Counter(rollout.index for rollout in group.failed)
        assert all(count == (3 if index not in indices else failures[index]) for index, count in failures.items())
    failed = sum(len(group.failed) for group in groups)
    scored = sum(len(group.rollouts) for group in groups)
    assert failed and snapshot.retried == len(harness.finished) - 300 and len(harness.finished) == scored + failed
    assert snapshot.ended == 300 and not any(snapshot.states.values()) and harness.engine.max_concurrent <= 16
    assert all(rollout.rewards == {"feedback": 1.0} for group in groups for rollout in group.rollouts)
    assert all(len(rollout.ledger.turns) == 4 for group in groups for rollout in group.rollouts)


async def test_slow_server_delays_only_the_rollouts_that_use_it() -> None:
    tool = BlockingTool()
    tasks = make_tasks(*["slow"] * 8, *["quick"] * 8)
    async with (
        open_harness({"slow": blocking_turns("slow"), "quick": ("done",)}, tool.block) as harness,
        harness.make_scheduler(4, inflight_rollouts=64, running_requests=2).submit(tasks) as groups,
    ):
        quick = [await anext(groups) for _ in range(8)]
        assert {group.task.id for group in quick} == {"quick"}
        assert tool.waiting["slow"] == 32 and harness.engine.in_flight == 0
        tool.event("slow").set()
        assert [len(group.rollouts) async for group in groups] == [4] * 8
    assert harness.engine.max_concurrent == 2


async def test_long_waiting_rollouts_are_limited_by_waiting() -> None:
    tool = BlockingTool()
    async with (
        open_harness({"slow": blocking_turns("slow"), "quick": ("done",)}, tool.block) as harness,
        harness.make_scheduler(1, inflight_rollouts=2, patience_s=1e-6, waiting=3).submit(
            make_tasks(*["slow"] * 9, "quick")
        ) as groups,
    ):
        while tool.waiting["slow"] < 5:
            await anyio.lowlevel.checkpoint()
        for _ in range(200):
            await anyio.lowlevel.checkpoint()
            assert len(harness.gateway.sessions) == tool.waiting["slow"] == 5
        tool.event("slow").set()
        assert len([group async for group in groups]) == 10


async def test_finished_groups_keep_their_slots_until_they_are_received() -> None:
    async with (
        open_harness({"*": ("done",)}) as harness,
        harness.make_scheduler(1, inflight_rollouts=2, waiting=0).submit(make_tasks(*"abcdef")) as groups,
    ):
        await anyio.wait_all_tasks_blocked()
        assert len(harness.finished) == 2
        await anext(groups)
        await anyio.wait_all_tasks_blocked()
        assert len(harness.finished) == 3
        assert len([group async for group in groups]) == 5


async def test_engine_slots_go_by_rank_and_are_never_lost() -> None:
    slots, served = EngineSlots(1), list[int]()
    scopes = {rank: anyio.CancelScope() for rank in range(1, 9)}

    async def use_slot(rank: int) -> None:
        with scopes[rank]:
            await slots.acquire(rank)
            served.append(rank)

    async def pass_slot_on() -> int:
        slots.release()
        await anyio.wait_all_tasks_blocked()
        return served[-1]

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            await slots.acquire(0)
            for rank in (1, 5, 2, 6, 7, 3, 8, 4):
                tasks.start_soon(use_slot, rank)
                await anyio.wait_all_tasks_blocked()
            scopes[1].cancel()
            await anyio.wait_all_tasks_blocked()
            assert [await pass_slot_on() for _ in range(2)] == [2, 3]
            scopes[4].cancel()  # It is given the slot before it learns of that, and gives it to the next.
            assert [await pass_slot_on() for _ in range(4)] == [5, 6, 7, 8]
            slots.release()
            await slots.acquire(0)


async def test_rollout_lets_another_start_only_while_it_waits_for_something_else() -> None:
    admission = Admission(ConcurrencySettings(inflight_rollouts=1), patience_s=1e-6)
    with anyio.fail_after(60):
        for slot in [await admission.acquire() for _ in range(2)]:
            slot.release()
        async with await admission.acquire(), anyio.create_task_group() as tasks:
            tasks.start_soon(admission.acquire)
            for _ in range(24):
                await anyio.lowlevel.checkpoint()
            assert admission._running == 1
            tasks.cancel_scope.cancel()
        await admission.acquire()
