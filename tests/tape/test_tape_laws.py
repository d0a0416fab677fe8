"""Whatever was recorded, and in whatever order it happened, is answered the same; whatever was not is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ReplayError
from gateway.gateway import Gateway
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.toolset import NativeToolset
from gateway.session import AnyGateway
from gateway.table import Source
from gateway.tape import Replay, recorded
from gateway.tape.asked import History, called
from gateway.tape.lines import answer_line
from gateway.types import Json, Task, ToolCall, ToolResult

Batch = Sequence[ToolCall]
Plan = tuple[str, Sequence[Batch]]
"""A task's id, and the messages of its session."""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = VALUES.map(lambda value: json.dumps({"value": value})) | st.text(max_size=4)
CALLS = st.builds(ToolCall, st.text(max_size=2), st.sampled_from(["tick", "other"]), ARGUMENTS)
PLANS = st.lists(
    st.tuples(st.sampled_from("st"), st.lists(st.lists(CALLS, max_size=3), max_size=4)), min_size=1, max_size=4
)


def ticking() -> Gateway:
    """Its answers can be told apart: no two are equal."""
    ticks: list[Json] = []

    async def tick(session: SessionContext, value: Json = None) -> str:
        """Answers with another number each time."""
        ticks.append(value)
        return f"{len(ticks)}: {value!r}"

    return Gateway([Source("tick", NativeToolset([FunctionTool(tick)]))])


def canonical(result: ToolResult) -> str:
    return json.dumps(answer_line(result, {}), sort_keys=True)


async def play(gateway: AnyGateway, plans: Sequence[Plan], random: Random) -> list[list[str]]:
    """Begins the sessions in their order, then takes their messages in any."""
    sessions = [await gateway.begin(Task(id)) for id, _ in plans]
    answers: list[list[str]] = [[] for _ in plans]
    steps = [place for place, (_, batches) in enumerate(plans) for _ in batches]
    random.shuffle(steps)
    rest = [list(batches) for _, batches in plans]
    for place in steps:
        answers[place] += map(canonical, await sessions[place].calls(rest[place].pop(0)))
    for session in random.sample(sessions, len(sessions)):
        await session.close()
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laws")


def fresh(folder: Path) -> Path:
    return folder / str(len(list(folder.iterdir())))


@given(plans=PLANS, random=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_any_sessions_in_any_interleaving_are_answered_to_the_byte(
    folder: Path, plans: list[Plan], random: Random
) -> None:
    async def main() -> None:
        tape = fresh(folder)
        async with recorded(ticking(), tape) as gateway:
            before = await play(gateway, plans, random)
        async with Replay(tape) as replay:
            assert await play(replay, plans, random) == before
            assert await play(replay, plans, random) == before

    anyio.run(main)


@given(batches=st.lists(st.lists(CALLS, min_size=1, max_size=3), min_size=1, max_size=4), data=st.data())
@settings(max_examples=40, deadline=None)
def test_one_changed_argument_is_refused(folder: Path, batches: list[list[ToolCall]], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(batches) - 1))
    changed = ToolCall("x", "tick", '{"value": "never asked"}')

    async def main() -> None:
        tape = fresh(folder)
        async with recorded(ticking(), tape) as gateway, gateway.open() as session:
            before = [list(map(canonical, await session.calls(batch))) for batch in batches]
        async with Replay(tape) as replay, replay.open() as session:
            for at, batch in enumerate(batches[:place]):
                assert list(map(canonical, await session.calls(batch))) == before[at]
            with pytest.raises(ReplayError, match=r"tick\(\{\"value\": \"never asked\"\}\) is not on the tape"):
                await session.calls([*batches[place][1:], changed])

    anyio.run(main)


@given(batches=st.lists(st.lists(CALLS, max_size=3), max_size=5))
def test_a_history_knows_the_order_of_messages_but_not_their_borders_or_ids(batches: list[list[ToolCall]]) -> None:
    one, other = History(Task("t")), History(Task("t"))
    for batch in batches:
        one.add([called(call, "policy") for call in batch])
        for call in batch:
            other.add([called(ToolCall("another", call.name, call.arguments), "policy")])
    assert one.digest == other.digest and one.count == sum(map(len, batches))
