"""Admission: limits on open rollouts and on generations, and engine slots by rank."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from tests.trainer.policy_scripts import make_tasks
from tests.trainer.rollout_harness import BlockingTool, blocking_turns, open_harness
from trainer.rollout.admission import Admission, EngineSlots
from trainer.rollout.settings import ConcurrencySettings


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
