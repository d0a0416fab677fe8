"""Admission: limits on open rollouts and on generations, and engine slots against a model of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from hypothesis import given, settings
from hypothesis import strategies as st

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


@dataclass
class SlotUser:
    """A task that acquires a slot, and holds it until its event is set."""

    rank: int
    release_event: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    has_slot: bool = False

    async def run(self, slots: EngineSlots) -> None:
        with self.scope:
            await slots.acquire(self.rank)
            self.has_slot = True
            try:
                await self.release_event.wait()
            finally:
                self.has_slot = False
                slots.release()


@dataclass
class ModelledSlots:
    """Engine slots and a model of them: the tasks that hold one, and those that wait."""

    count: int
    running: TaskGroup
    holding: list[SlotUser] = field(default_factory=list)
    waiting: list[SlotUser] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = EngineSlots(self.count)

    def start(self, rank: int) -> None:
        user = SlotUser(rank)
        self.running.start_soon(user.run, self.slots)
        self.waiting.append(user)
        self._grant()

    def end(self, choice: int, *, cancelled: bool) -> None:
        if self.holding:
            user = self.holding.pop(choice % len(self.holding))
            _ = user.scope.cancel() if cancelled else user.release_event.set()
            self._grant()

    def cancel_waiting(self, choice: int) -> None:
        if self.waiting:
            self.waiting.pop(choice % len(self.waiting)).scope.cancel()

    def cancel_after_grant(self) -> None:
        """Cancels a waiting task that was just granted a slot, before it runs."""
        if self.holding and self.waiting:
            best = min(self.waiting, key=lambda user: user.rank)
            self.end(0, cancelled=False)
            best.scope.cancel()
            self.holding.remove(best)
            self._grant()

    def _grant(self) -> None:
        while self.waiting and len(self.holding) < self.count:
            first = min(self.waiting, key=lambda user: user.rank)
            self.waiting.remove(first)
            self.holding.append(first)


async def let_tasks_run() -> None:
    """Runs the loop long enough to pass a slot from task to task; no task waits for time."""
    for _ in range(24):
        await anyio.lowlevel.checkpoint()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "end", "cancel", "cancel_waiting", "cancel_after_grant"]), st.integers(0, 7)
    ),
    max_size=40,
)


@settings(deadline=None)  # Another process may have the machine meanwhile.
@given(count=st.integers(1, 3), operations=OPERATIONS)
def test_engine_slots_go_by_rank_and_are_never_lost(count: int, operations: list[tuple[str, int]]) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as running:
            model = ModelledSlots(count, running)
            for operation, number in operations:
                match operation:
                    case "start":
                        model.start(number)
                    case "end" | "cancel":
                        model.end(number, cancelled=operation == "cancel")
                    case "cancel_waiting":
                        model.cancel_waiting(number)
                    case "cancel_after_grant":
                        model.cancel_after_grant()
                await let_tasks_run()
                assert all(user.has_slot for user in model.holding)
                assert not any(user.has_slot for user in model.waiting)
            for user in (*model.holding, *model.waiting):
                user.release_event.set()
        with anyio.fail_after(60):  # All tasks have ended, so all slots are free.
            async with anyio.create_task_group() as last_users:
                users = [SlotUser(0) for _ in range(count)]
                for user in users:
                    last_users.start_soon(user.run, model.slots)
                await let_tasks_run()
                assert all(user.has_slot for user in users)
                last_users.cancel_scope.cancel()

    anyio.run(main)


async def test_long_waiting_rollout_lets_exactly_one_more_start() -> None:
    admission = Admission(ConcurrencySettings(inflight_rollouts=2), patience_s=1e-6)
    started: list[str] = []

    async def run_rollout(name: str) -> None:
        slot = await admission.acquire()
        async with slot:
            started.append(name)
            await release_events[name].wait()
        slot.release()

    release_events = {name: anyio.Event() for name in "abc"}
    with anyio.fail_after(60):
        waiting_slot = await admission.acquire()
        async with anyio.create_task_group() as running:
            for number, name in enumerate(release_events):
                running.start_soon(run_rollout, name)
                while len(started) < min(number + 1, 2):
                    await anyio.lowlevel.checkpoint()
            await let_tasks_run()
            assert started == ["a", "b"], "two generate, and one waits for something else"
            waiting_slot.release()
            await let_tasks_run()
            assert started == ["a", "b"]
            release_events["a"].set()
            while len(started) < 3:
                await anyio.lowlevel.checkpoint()
            release_events["b"].set()
            release_events["c"].set()
