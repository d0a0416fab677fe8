"""Who may begin and who may write, so that whoever waits keeps nobody else waiting."""

from __future__ import annotations

import anyio
import anyio.lowlevel

from tests.trainer.crowd import Doors, house, knocks
from tests.trainer.scripts import calling, tasks


async def test_a_rollout_that_waits_for_a_tool_lends_its_place_to_another() -> None:
    doors = Doors()
    async with (
        house({"slow": knocks("slow"), "quick": ("done",)}, doors.knock) as at,
        at.groups(1, writing=1).play(tasks("slow", "quick")) as done,
    ):
        assert (await anext(done)).task.id == "quick"
        assert doors.inside["slow"] == 1
        doors.door("slow").set()
        assert (await anext(done)).task.id == "slow"
    assert at.engine.most == 1 and at.keys == ["0/slow/0", "1/quick/0", "0/slow/0"]


async def test_who_began_earlier_writes_earlier() -> None:
    doors = Doors()
    async with house({"slow": knocks("slow"), "*": ("done",)}, doors.knock) as at:
        held = at.engine.hold("1/a/0")
        async with at.groups(1, writing=1).play(tasks("slow", "a", "b", "c")) as done:
            await anyio.wait_all_tasks_blocked()
            assert (doors.inside["slow"], at.engine.writing) == (1, 1)
            doors.door("slow").set()
            await anyio.wait_all_tasks_blocked()
            held.set()
            assert len([group async for group in done]) == 4
    assert at.keys == ["0/slow/0", "1/a/0", "0/slow/0", "2/b/0", "3/c/0"]


async def test_no_more_rollouts_are_open_than_may_be_and_the_next_begins_when_one_is_over() -> None:
    doors = Doors()
    names = [f"t{number}" for number in range(5)]
    async with (
        house({name: knocks(name) for name in names}, doors.knock) as at,
        at.groups(1, open=2, waiting=0).play(tasks(*names)) as done,
    ):
        for name, inside in zip(names, (2, 2, 2, 2, 1), strict=True):
            await anyio.wait_all_tasks_blocked()
            assert len(at.gateway.sessions) == doors.inside.total() == inside
            doors.door(name).set()
            assert (await anext(done)).task.id == name


async def test_a_slow_server_holds_up_only_those_that_wait_for_it() -> None:
    doors = Doors()
    some = tasks(*["slow"] * 8, *["quick"] * 8)
    async with (
        house({"slow": knocks("slow"), "quick": ("done",)}, doors.knock) as at,
        at.groups(4, open=64, writing=2).play(some) as done,
    ):
        quick = [await anext(done) for _ in range(8)]
        assert {group.task.id for group in quick} == {"quick"}
        assert doors.inside["slow"] == 32 and at.engine.writing == 0
        doors.door("slow").set()
        assert [len(group.rollouts) async for group in done] == [4] * 8
    assert at.engine.most == 2


async def test_a_slow_server_that_all_next_in_line_need_does_not_keep_the_rest_from_beginning() -> None:
    doors = Doors()
    some = tasks(*["slow"] * 4, *["quick"] * 6)
    async with (
        house({"slow": knocks("slow"), "quick": ("done",)}, doors.knock) as at,
        at.groups(2, open=2, patience_s=0.01, waiting=8).play(some) as done,
    ):
        quick = [await anext(done) for _ in range(6)]
        assert [(group.task.id, len(group.rollouts)) for group in quick] == [("quick", 2)] * 6
        assert doors.inside["slow"] == 8, "all of them still wait, four times as many as may be open"
        doors.door("slow").set()
        assert [len(group.rollouts) async for group in done] == [2] * 4


async def test_rollouts_that_made_room_are_no_more_than_may_wait() -> None:
    doors = Doors()
    async with (
        house({"slow": knocks("slow"), "quick": ("done",)}, doors.knock) as at,
        at.groups(1, open=2, patience_s=1e-6, waiting=3).play(tasks(*["slow"] * 9, "quick")) as done,
    ):
        while doors.inside["slow"] < 5:
            await anyio.lowlevel.checkpoint()
        for _ in range(200):
            await anyio.lowlevel.checkpoint()
            assert len(at.gateway.sessions) == doors.inside["slow"] == 5
        doors.door("slow").set()
        assert len([group async for group in done]) == 10


async def test_quick_tools_make_no_room_for_more_than_may_be_open() -> None:
    most = 0

    async def look() -> str:
        """Looks around."""
        nonlocal most
        most = max(most, len(at.gateway.sessions))
        await anyio.lowlevel.checkpoint()
        return "nothing"

    async with house({"*": (calling(("look", {})), calling(("look", {})), "done")}, look) as at:
        assert len(await at.all(tasks(*"abcdefgh"), 4, open=5, patience_s=60)) == 8
    assert most == 5


async def test_groups_that_nobody_takes_do_not_pile_up() -> None:
    async with (
        house({"*": ("done",)}) as at,
        at.groups(1, open=2, waiting=0).play(tasks(*"abcdef")) as done,
    ):
        await anyio.wait_all_tasks_blocked()
        assert len(at.kept) == 2
        await anext(done)
        await anyio.wait_all_tasks_blocked()
        assert len(at.kept) == 3
        assert len([group async for group in done]) == 5
