"""What was recorded is answered again to the byte, and what was not is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pictures

from gateway.errors import ConfigError, GatewayError, ReplayError
from gateway.feedback.gsm8k import Gsm8kInteraction
from gateway.feedback.toolset import FeedbackToolset
from gateway.gateway import Gateway
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from gateway.native.function import FunctionTool
from gateway.native.toolset import ClassTool, NativeToolset
from gateway.session import AnyGateway, Reward
from gateway.table import Source
from gateway.tape import Replay, describe, recorded
from gateway.types import Feedback, Hints, Outcome, Task, ToolCall, ToolResult
from gateway.wire import dumps, feedback_json, result_json


class Tick(BaseTool):
    """Answers with another number each time: a replay that asked it would be found out."""

    ticks = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        Tick.ticks += 1
        return ToolResponse(text=f"{parameters.get('word', '')} {Tick.ticks}"), float(Tick.ticks), {"tick": Tick.ticks}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 7.0


def draw(colour: str) -> list[Any]:
    """Draws."""
    return [f"all {colour}", Pictures.new("RGB", (2, 2), colour)]


def pure(x: int) -> int:
    """Always the same."""
    return x * 2


def gateway() -> Gateway:
    schema = {"function": {"name": "tick", "parameters": {"type": "object"}}}
    tools = [
        ClassTool(Tick({}, OpenAIFunctionToolSchema.model_validate(schema))),
        FunctionTool(draw),
        FunctionTool(pure, hints=Hints(pure=True)),
    ]
    feedback = FeedbackToolset({"gsm8k": Gsm8kInteraction({"name": "gsm8k"})})
    return Gateway([Source("native", NativeToolset(tools)), Source("feedback", feedback)])


def call(name: str, id: str = "1", **arguments: Any) -> ToolCall:
    return ToolCall(id, name, json.dumps(arguments))


TASK = Task(id="t", feedback="gsm8k", feedback_args={"ground_truth": "4"})
Said = list[ToolResult | Feedback | Sequence[Reward]]


async def talk(gateway: AnyGateway, task: Task = TASK, ids: str = "a") -> Said:
    """A rollout with everything in it."""
    said: Said = []
    async with gateway.open(task) as session:
        said += await session.calls(
            [call("tick", ids, word="x"), call("tick", ids + "2", word="x"), call("draw", colour="red")]
        )
        said.append(await session.feedback([{"role": "assistant", "content": "#### 3"}]))
        said.append(await session.call(call("tick", ids + "3", word="y")))
        said.append(await session.call(ToolCall("4", "draw", '{"colour": 1}')))
        said.append(await session.call(call("nothing")))
        said.append(
            await session.feedback(
                [{"role": "assistant", "content": "#### 3"}, {"role": "assistant", "content": "#### 4"}]
            )
        )
    # Calls of one message end in any order, and so do their rewards.
    said.append(sorted((Reward(r.source, r.value, r.kind) for r in session.rewards), key=str))
    return said


def on_the_wire(said: Said) -> list[bytes]:
    forms = {ToolResult: lambda one: result_json(call("x"), one), Feedback: feedback_json}
    return [dumps(forms[type(one)](one)) for one in said if type(one) in forms]


async def test_a_recorded_rollout_is_replayed_to_the_byte_without_any_tool(tmp_path: Path) -> None:
    async with recorded(gateway(), tmp_path / "tape") as recording:
        before = await talk(recording)
    ticks = Tick.ticks
    async with Replay(tmp_path / "tape") as replay:
        assert [spec.name for spec in replay.specs] == [spec.name for spec in recording.specs]
        after = await talk(replay, ids="other")
        again = await talk(replay)
    assert Tick.ticks == ticks
    assert after == before == again and on_the_wire(after) == on_the_wire(before)
    assert [type(one).__name__ for one in before].count("Feedback") == 2


async def test_siblings_of_a_group_take_their_answers_in_the_order_of_the_recording(tmp_path: Path) -> None:
    async with recorded(gateway(), tmp_path / "tape") as recording:
        before = [await talk(recording) for _ in range(3)]
    async with Replay(tmp_path / "tape") as replay:
        assert [await talk(replay) for _ in range(3)] == before
        assert [await talk(replay) for _ in range(3)] == before, "and once more, for another run"


async def test_how_quickly_parallel_calls_are_answered_does_not_matter(tmp_path: Path) -> None:
    first = anyio.Event()

    async def slow(place: int) -> int:
        """The first call waits for the second."""
        if place == 0:
            await first.wait()
        first.set()
        return place

    source = Source("slow", NativeToolset([FunctionTool(slow)]))
    batch = [call("slow", place=0), call("slow", place=1)]
    with anyio.fail_after(10):
        async with recorded(Gateway([source]), tmp_path / "tape") as recording, recording.open(Task()) as session:
            before = await session.calls(batch)
    async with Replay(tmp_path / "tape") as replay, replay.open(Task()) as session:
        assert await session.calls(batch) == before


async def test_what_is_not_on_the_tape_is_refused_with_what_is(tmp_path: Path) -> None:
    async with recorded(gateway(), tmp_path / "tape") as recording:
        await talk(recording)
    async with Replay(tmp_path / "tape") as replay:
        with pytest.raises(ReplayError, match=r"no session was recorded for task 'u'.*recorded tasks: 't'"):
            await replay.begin(Task(id="u"))
        async with replay.open(TASK) as session:
            with pytest.raises(
                ReplayError, match=r'after 0 questions: tick\(.*is not on the tape.*tick\({"word": "x"}\)'
            ):
                await session.call(call("tick", word="z"))


async def test_only_a_pure_tool_answers_more_often_than_it_was_recorded(tmp_path: Path) -> None:
    async with recorded(gateway(), tmp_path / "tape") as recording:
        async with recording.open(TASK) as session:
            await session.call(call("pure", x=2))
        async with recording.open(TASK) as session:
            await session.call(call("tick"))
    async with Replay(tmp_path / "tape") as replay:
        one, other = await replay.begin(TASK), await replay.begin(TASK)
        assert [(await session.call(call("pure", x=2))).text for session in (one, other)] == ["4", "4"]
        one, other = await replay.begin(TASK), await replay.begin(TASK)
        assert (await one.call(call("tick"))).outcome is Outcome.OK
        with pytest.raises(ReplayError):
            await other.call(call("tick"))


async def test_equal_arguments_written_otherwise_are_the_same_question(tmp_path: Path) -> None:
    async with recorded(gateway(), tmp_path / "tape") as recording, recording.open(TASK) as session:
        before = await session.call(ToolCall("1", "tick", '{"word": "x", "b": [1]}'))
    async with Replay(tmp_path / "tape") as replay, replay.open(TASK) as session:
        assert await session.call(ToolCall("2", "tick", '{"b":[1],  "word":"x"}')) == before


async def record(path: Path) -> Path:
    async with recorded(gateway(), path) as recording:
        await talk(recording)
    return path


async def test_a_line_that_a_crash_cut_off_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tape = await record(tmp_path / "tape")
    with (tape / "tape.jsonl").open("ab") as file:
        file.write(b'{"kind": "call", "sess')
    async with Replay(tape) as replay:
        assert len(await talk(replay)) == 9
    assert "cut off by a crash" in caplog.text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda tape: (tape / "tape.jsonl").unlink(), "cannot be read.*--record"),
        (
            lambda tape: (tape / "tape.jsonl").write_text('{"kind": "tape", "format": 99}\n'),
            "format 99; this mtrl reads",
        ),
        (lambda tape: (tape / "tape.jsonl").write_text("{}\n"), "no tape at all"),
        (lambda tape: (tape / "tape.jsonl").write_text("nonsense\n"), "line 1 is damaged"),
        (lambda tape: (tape / "tape.jsonl").write_text(""), "empty"),
    ],
)
async def test_what_is_no_tape_is_told_apart(tmp_path: Path, damage: Any, words: str) -> None:
    tape = await record(tmp_path / "tape")
    damage(tape)
    with pytest.raises(ReplayError, match=f"(?s){words}"):
        async with Replay(tape):
            pass


@pytest.mark.parametrize(("data", "words"), [(None, "is missing"), (b"other", "is not what was recorded")])
async def test_a_medium_that_is_gone_or_changed_is_never_passed_off(
    tmp_path: Path, data: bytes | None, words: str
) -> None:
    tape = await record(tmp_path / "tape")
    (blob,) = (tape / "blobs").iterdir()
    blob.unlink()
    if data is not None:
        blob.write_bytes(data)
    with pytest.raises(ReplayError, match=words):
        async with Replay(tape) as replay:
            await talk(replay)


async def test_a_recording_never_writes_over_another(tmp_path: Path) -> None:
    tape = await record(tmp_path / "tape")
    with pytest.raises(ConfigError, match="there is a recording already"):
        async with recorded(gateway(), tape):
            pass


async def test_a_full_disk_stops_the_recording_with_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gateway.tape.write as write

    class Full(write.FileIO):  # type: ignore[misc]
        def write(self, data: Any) -> int:
            if b'"call"' in bytes(data):
                raise OSError(28, "No space left on device")
            return super().write(data)

    monkeypatch.setattr(write, "FileIO", Full)
    with pytest.raises(GatewayError, match=r"has stopped: No space left on device.*can be replayed"):
        async with recorded(gateway(), tmp_path / "tape") as recording, recording.open(TASK) as session:
            await session.call(call("tick"))
    assert describe(tmp_path / "tape").sessions == 1


async def test_a_tape_can_be_summed_up_for_a_person(tmp_path: Path) -> None:
    summary = describe(await record(tmp_path / "tape"))
    assert (summary.sessions, summary.calls, summary.feedback, summary.blobs) == (1, 6, 2, 1)
    assert "1 sessions, 6 calls" in str(summary) and "tick" in str(summary)


ASKED = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), max_size=4)


@given(st.lists(st.tuples(st.sampled_from(["s", "t"]), ASKED), min_size=1, max_size=4), st.randoms())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_rollouts_are_replayed_equal_in_any_order_of_different_tasks(
    tmp_path_factory: pytest.TempPathFactory, plans: list[tuple[str, list[list[str]]]], random: Any
) -> None:
    tape = tmp_path_factory.mktemp("any") / "tape"

    async def play(gateway: AnyGateway, task: str, batches: list[list[str]]) -> list[ToolResult]:
        async with gateway.open(Task(id=task)) as session:
            return [
                result
                for batch in batches
                for result in await session.calls([call("tick", word=word) for word in batch])
            ]

    async def main() -> None:
        async with recorded(gateway(), tape) as recording:
            before = [await play(recording, *plan) for plan in plans]
        order = sorted(range(len(plans)), key=lambda place: (plans[place][0], place))
        if random.random() < 0.5:
            order = sorted(range(len(plans)), key=lambda place: (plans[place][0] == "s", place))
        async with Replay(tape) as replay:
            after = {place: await play(replay, *plans[place]) for place in order}
        assert [after[place] for place in range(len(plans))] == before

    anyio.run(main)
