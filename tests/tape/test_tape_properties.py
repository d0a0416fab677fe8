"""Property tests of tapes: any recorded sessions in any order are replayed equally, and changes are errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.gateway import Gateway
from gateway.native.function import FunctionTool, SessionContext
from gateway.native.native_toolset import NativeToolset
from gateway.session import AnyGateway
from gateway.tape import ReplayGateway, record_gateway
from gateway.tape.line_format import RequestHistory, digest_call, encode_answer
from gateway.tool_table import Source
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


def build_tick_gateway() -> Gateway:
    """A gateway whose answers are all different."""
    ticks: list[Json] = []

    async def tick(session: SessionContext, value: Json = None) -> str:
        """Answers with another number each time."""
        ticks.append(value)
        return f"{len(ticks)}: {value!r}"

    return Gateway([Source("tick", NativeToolset([FunctionTool(tick)]))])


def to_text(result: ToolResult) -> str:
    return json.dumps(encode_answer(result, {}), sort_keys=True)


async def run_plans(gateway: AnyGateway, plans: Sequence[Plan], random: Random) -> list[list[str]]:
    """Opens the sessions in order, then sends their messages in random order."""
    sessions = [await gateway.begin(Task(id)) for id, _ in plans]
    answers: list[list[str]] = [[] for _ in plans]
    order = [index for index, (_, batches) in enumerate(plans) for _ in batches]
    random.shuffle(order)
    remaining = [list(batches) for _, batches in plans]
    for index in order:
        answers[index] += map(to_text, await sessions[index].calls(remaining[index].pop(0)))
    for session in random.sample(sessions, len(sessions)):
        await session.close()
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laws")


def new_tape_path(folder: Path) -> Path:
    return folder / str(len(list(folder.iterdir())))


@given(plans=PLANS, random=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_interleaved_sessions_are_replayed_byte_for_byte(folder: Path, plans: list[Plan], random: Random) -> None:
    async def main() -> None:
        tape = new_tape_path(folder)
        async with record_gateway(build_tick_gateway(), tape) as gateway:
            recorded = await run_plans(gateway, plans, random)
        async with ReplayGateway(tape) as replay:
            assert await run_plans(replay, plans, random) == recorded
            assert await run_plans(replay, plans, random) == recorded

    anyio.run(main)


@given(batches=st.lists(st.lists(CALLS, max_size=3), max_size=5))
def test_history_digest_ignores_message_borders_and_call_ids(batches: list[list[ToolCall]]) -> None:
    by_message, by_call = RequestHistory(Task("t")), RequestHistory(Task("t"))
    for batch in batches:
        by_message.add([digest_call(call, "policy") for call in batch])
        for call in batch:
            by_call.add([digest_call(ToolCall("another", call.name, call.arguments), "policy")])
    assert by_message.digest == by_call.digest and by_message.count == sum(map(len, batches))
