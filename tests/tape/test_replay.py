"""Replay of a tape: recorded requests get the same answers byte for byte, others are errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pictures

from gateway.errors import GatewayError, ReplayError
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.interaction_toolset import FeedbackToolset
from gateway.gateway import Gateway
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import ClassTool, NativeToolset
from gateway.session import AnyGateway, Reward
from gateway.tape import ReplayGateway, record_gateway
from gateway.tape.line_format import RequestHistory, digest_call, encode_answer
from gateway.tape.tape_file import load_tape
from gateway.tool_table import Source
from gateway.types import Feedback, Hints, Outcome, Task, ToolCall, ToolResult
from gateway.wire import dumps, feedback_to_json, result_to_json


class TickTool(BaseTool):
    """Returns another number at each call, so that a replay that calls it would be noticed."""

    ticks = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        TickTool.ticks += 1
        return (
            ToolResponse(text=f"{parameters.get('word', '')} {TickTool.ticks}"),
            float(TickTool.ticks),
            {"tick": TickTool.ticks},
        )

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 7.0


def draw(colour: str) -> list[Any]:
    """Draws."""
    return [f"all {colour}", Pictures.new("RGB", (2, 2), colour)]


def pure(x: int) -> int:
    """Always the same."""
    return x * 2


def build_gateway() -> Gateway:
    schema = {"function": {"name": "tick", "parameters": {"type": "object"}}}
    tools = [
        ClassTool(TickTool({}, OpenAIFunctionToolSchema.model_validate(schema))),
        FunctionTool(draw),
        FunctionTool(pure, hints=Hints(pure=True)),
    ]
    feedback = FeedbackToolset({"gsm8k": Gsm8kInteraction({"name": "gsm8k"})})
    return Gateway([Source("native", NativeToolset(tools)), Source("feedback", feedback)])


def call(name: str, id: str = "1", **arguments: Any) -> ToolCall:
    return ToolCall(id, name, json.dumps(arguments))


TASK = Task(id="t", feedback="gsm8k", feedback_args={"ground_truth": "4"})
Answers = list[ToolResult | Feedback | Sequence[Reward]]


async def run_rollout(gateway: AnyGateway, task: Task = TASK, call_id: str = "a") -> Answers:
    """A rollout with calls, a message of several calls, feedback, errors and rewards."""
    answers: Answers = []
    async with gateway.open(task) as session:
        answers += await session.calls(
            [call("tick", call_id, word="x"), call("tick", call_id + "2", word="x"), call("draw", colour="red")]
        )
        answers.append(await session.feedback([{"role": "assistant", "content": "#### 3"}]))
        answers.append(await session.call(call("tick", call_id + "3", word="y")))
        answers.append(await session.call(ToolCall("4", "draw", '{"colour": 1}')))
        answers.append(await session.call(call("nothing")))
        answers.append(
            await session.feedback(
                [{"role": "assistant", "content": "#### 3"}, {"role": "assistant", "content": "#### 4"}]
            )
        )
    # Calls of one message end in any order, and so do their rewards.
    answers.append(sorted((Reward(r.source, r.value, r.kind) for r in session.rewards), key=str))
    return answers


def to_wire_json(answers: Answers) -> list[bytes]:
    encoders = {ToolResult: lambda answer: result_to_json(call("x"), answer), Feedback: feedback_to_json}
    return [dumps(encoders[type(answer)](answer)) for answer in answers if type(answer) in encoders]


async def test_recorded_rollout_is_replayed_byte_for_byte_without_tools(tmp_path: Path) -> None:
    async with record_gateway(build_gateway(), tmp_path / "tape") as recorder:
        recorded = await run_rollout(recorder)
    ticks = TickTool.ticks
    async with ReplayGateway(tmp_path / "tape") as replay:
        assert [spec.name for spec in replay.specs] == [spec.name for spec in recorder.specs]
        replayed = await run_rollout(replay, call_id="other")
        replayed_again = await run_rollout(replay)
    assert TickTool.ticks == ticks
    assert replayed == recorded == replayed_again and to_wire_json(replayed) == to_wire_json(recorded)
    assert [type(answer).__name__ for answer in recorded].count("Feedback") == 2


async def test_order_of_answers_to_parallel_calls_does_not_matter(tmp_path: Path) -> None:
    first = anyio.Event()

    async def slow(index: int) -> int:
        """The first call waits for the second."""
        if index == 0:
            await first.wait()
        first.set()
        return index

    source = Source("slow", NativeToolset([FunctionTool(slow)]))
    batch = [call("slow", index=0), call("slow", index=1)]
    with anyio.fail_after(60):
        async with record_gateway(Gateway([source]), tmp_path / "tape") as recorder, recorder.open(Task()) as session:
            recorded = await session.calls(batch)
    async with ReplayGateway(tmp_path / "tape") as replay, replay.open(Task()) as session:
        assert await session.calls(batch) == recorded


async def test_only_pure_tools_are_replayed_more_often_than_recorded(tmp_path: Path) -> None:
    async with record_gateway(build_gateway(), tmp_path / "tape") as recorder:
        async with recorder.open(TASK) as session:
            await session.call(call("pure", x=2))
        async with recorder.open(TASK) as session:
            await session.call(call("tick"))
    async with ReplayGateway(tmp_path / "tape") as replay:
        answer, other = await replay.begin(TASK), await replay.begin(TASK)
        assert [(await session.call(call("pure", x=2))).text for session in (answer, other)] == ["4", "4"]
        answer, other = await replay.begin(TASK), await replay.begin(TASK)
        assert (await answer.call(call("tick"))).outcome is Outcome.OK
        with pytest.raises(ReplayError):
            await other.call(call("tick"))


async def record_tape(path: Path) -> Path:
    async with record_gateway(build_gateway(), path) as recorder:
        await run_rollout(recorder)
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tape: (tape / "tape.jsonl").unlink(), "cannot be read.*--record"),
        (
            lambda tape: (tape / "tape.jsonl").write_text('{"kind": "tape", "format": 99}\n'),
            "format 99; this mtrl reads",
        ),
        (lambda tape: (tape / "tape.jsonl").write_text("{}\n"), "this is not a tape"),
        (lambda tape: (tape / "tape.jsonl").write_text("nonsense\n"), "line 1 is damaged"),
        (lambda tape: (tape / "tape.jsonl").write_text(""), "empty"),
    ],
)
async def test_damaged_tapes_have_distinct_errors(tmp_path: Path, damage: Any, message: str) -> None:
    tape = await record_tape(tmp_path / "tape")
    damage(tape)
    with pytest.raises(ReplayError, match=f"(?s){message}"):
        async with ReplayGateway(tape):
            pass


@pytest.mark.parametrize(("data", "message"), [(None, "is missing"), (b"other", "is not what was recorded")])
async def test_missing_or_changed_blob_is_an_error(tmp_path: Path, data: bytes | None, message: str) -> None:
    tape = await record_tape(tmp_path / "tape")
    (blob,) = (tape / "blobs").iterdir()
    blob.unlink()
    if data is not None:
        blob.write_bytes(data)
    with pytest.raises(ReplayError, match=message):
        async with ReplayGateway(tape) as replay:
            await run_rollout(replay)


async def test_full_disk_stops_the_recording_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.tape import tape_writer

    class FullDisk(tape_writer.FileIO):  # type: ignore[misc]
        def write(self, data: Any) -> int:
            if b'"call"' in bytes(data):
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(tape_writer, "FileIO", FullDisk)
    with pytest.raises(GatewayError, match=r"has stopped: No space left on device.*can be replayed"):
        async with record_gateway(build_gateway(), tmp_path / "tape") as recorder, recorder.open(TASK) as session:
            await session.call(call("tick"))
    assert len(load_tape(tmp_path / "tape").sessions) == 1


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
        async with record_gateway(build_gateway(), tape) as gateway:
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
