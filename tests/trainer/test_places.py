"""The law of places: never more are held than there are, none is lost, and whoever began first goes first."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import Admission
from trainer.room import Places, Room


@dataclass
class Taker:
    """Somebody who wants a place, and holds it until told to go."""

    rank: int
    go: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    holds: bool = False

    async def take(self, places: Places) -> None:
        with self.scope:
            await places.take(self.rank)
            self.holds = True
            try:
                await self.go.wait()
            finally:
                self.holds = False
                places.give()


@dataclass
class Modelled:
    """Places beside a model of them: who holds one, and who waits, in order."""

    count: int
    running: TaskGroup
    holding: list[Taker] = field(default_factory=list)
    waiting: list[Taker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = Places(self.count)

    def enter(self, rank: int) -> None:
        taker = Taker(rank)
        self.running.start_soon(taker.take, self.places)
        self.waiting.append(taker)
        self._grant()

    def leave(self, choice: int, *, cancelled: bool) -> None:
        if self.holding:
            taker = self.holding.pop(choice % len(self.holding))
            _ = taker.scope.cancel() if cancelled else taker.go.set()
            self._grant()

    def give_up(self, choice: int) -> None:
        if self.waiting:
            self.waiting.pop(choice % len(self.waiting)).scope.cancel()

    def lose_what_was_just_won(self) -> None:
        """A place is given to somebody who is cancelled before they could know."""
        if self.holding and self.waiting:
            best = min(self.waiting, key=lambda taker: taker.rank)
            self.leave(0, cancelled=False)
            best.scope.cancel()
            self.holding.remove(best)
            self._grant()

    def _grant(self) -> None:
        while self.waiting and len(self.holding) < self.count:
            first = min(self.waiting, key=lambda taker: taker.rank)
            self.waiting.remove(first)
            self.holding.append(first)


async def settled() -> None:
    """As many rounds of the loop as a place needs to go through the hands of all; none of them waits for time."""
    for _ in range(24):
        await anyio.lowlevel.checkpoint()


OPS = st.lists(
    st.tuples(st.sampled_from(["enter", "enter", "leave", "cancel", "give_up", "lose"]), st.integers(0, 7)),
    max_size=40,
)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@settings(deadline=None)  # Another process may have the machine meanwhile.
@given(count=st.integers(1, 3), ops=OPS)
def test_places_go_by_rank_and_come_back_however_their_holders_end(
    loop: str, count: int, ops: list[tuple[str, int]]
) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as running:
            room = Modelled(count, running)
            for op, number in ops:
                match op:
                    case "enter":
                        room.enter(number)
                    case "leave" | "cancel":
                        room.leave(number, cancelled=op == "cancel")
                    case "give_up":
                        room.give_up(number)
                    case "lose":
                        room.lose_what_was_just_won()
                await settled()
                assert all(taker.holds for taker in room.holding)
                assert not any(taker.holds for taker in room.waiting)
            for taker in (*room.holding, *room.waiting):
                taker.go.set()
        with anyio.fail_after(10):  # All are gone, so that all places can be had at once.
            async with anyio.create_task_group() as last:
                all_in = [Taker(0) for _ in range(count)]
                for taker in all_in:
                    last.start_soon(taker.take, room.places)
                await settled()
                assert all(taker.holds for taker in all_in)
                last.cancel_scope.cancel()

    anyio.run(main, backend=loop)


async def test_one_that_waits_long_makes_room_for_one_and_no_more() -> None:
    room = Room(Admission(open=2, patience_s=1e-6))
    begun: list[str] = []

    async def begin(name: str) -> None:
        stay = await room.enter()
        async with stay:
            begun.append(name)
            await go[name].wait()
        stay.leave()

    go = {name: anyio.Event() for name in "abc"}
    with anyio.fail_after(10):
        waits = await room.enter()
        async with anyio.create_task_group() as running:
            for number, name in enumerate(go):
                running.start_soon(begin, name)
                while len(begun) < min(number + 1, 2):
                    await anyio.lowlevel.checkpoint()
            await settled()
            assert begun == ["a", "b"], "two that write, and one that made room"
            waits.leave()
            await settled()
            assert begun == ["a", "b"]
            go["a"].set()
            while len(begun) < 3:
                await anyio.lowlevel.checkpoint()
            go["b"].set()
            go["c"].set()
