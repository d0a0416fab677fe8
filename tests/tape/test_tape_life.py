"""A tape survives crashes, full disks, cancelled callers and expired sessions; and it crosses every door."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.client import RemoteGateway
from gateway.errors import ReplayError, SessionError
from gateway.gateway import Gateway
from gateway.native.function import FunctionTool
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.tape import Recorded, Replay, describe, recorded
from gateway.types import Context, Hints, Outcome, Task, ToolCall
from tests.doors.kit import PNG, SEVERAL, sources
from tests.served import served, until

ROOT = Path(__file__).parents[2]
TASK = Task("row-7", feedback="gsm8k", feedback_args={"ground_truth": "4"})


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("id", name, json.dumps(arguments))


def counting(pure: bool = False) -> Gateway:
    told: list[int] = []

    def count(step: int = 1) -> int:
        """Counts what all rollouts asked of it."""
        told.append(step)
        return len(told)

    return Gateway([Source("count", NativeToolset([FunctionTool(count, hints=Hints(pure=pure))]))])


def lines(tape: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tape / "tape.jsonl").read_text().splitlines()]


async def test_every_kind_of_part_comes_back_as_it_was(tmp_path: Path) -> None:
    async with recorded(Gateway(sources()), tmp_path / "tape") as gateway, gateway.open(TASK) as session:
        before = await session.call(call("several"))
    async with Replay(tmp_path / "tape") as replay, replay.open(TASK) as session:
        after = await session.call(call("several"))
    assert before == after and [type(part) for part in after.parts] == [type(part) for part in SEVERAL]
    blobs = [blob.read_bytes() for blob in (tmp_path / "tape" / "blobs").iterdir()]
    assert blobs.count(PNG) == 1


async def test_a_recording_made_here_is_replayed_over_http(tmp_path: Path) -> None:
    async with recorded(Gateway(sources()), tmp_path / "tape") as gateway, gateway.open(TASK) as session:
        before = await session.calls([call("add", a=1), call("remember", word="x"), call("several")])
        turn = await session.feedback([{"role": "assistant", "content": "#### 4"}])
    async with served(lambda: Replay(tmp_path / "tape")) as at, RemoteGateway(at.url) as remote:
        async with remote.open(TASK) as session:
            assert session.name == "gsm8k"
            assert await session.calls([call("add", a=1), call("remember", word="x"), call("several")]) == before
            assert await session.feedback([{"role": "assistant", "content": "#### 4"}]) == turn
            with pytest.raises(ReplayError, match=r"task 'row-7' after 4 questions: add\(\{\"a\": 9\}\) is not on the"):
                await session.call(call("add", a=9))
        with pytest.raises(ReplayError, match="no session was recorded for task 'row-8'"):
            await remote.begin(Task("row-8"))


async def test_a_gateway_in_another_process_can_be_recorded(tmp_path: Path) -> None:
    async with (
        served(lambda: Gateway(sources())) as at,
        Recorded(RemoteGateway(at.url), tmp_path / "tape") as gateway,
        gateway.open(TASK) as session,
    ):
        before = await session.calls([call("add", a=1), call("several")])
    async with Replay(tmp_path / "tape") as replay, replay.open(TASK) as session:
        assert session.heard is not None and session.heard.name == "gsm8k"
        assert await session.calls([call("add", a=1), call("several")]) == before


async def test_who_may_enter_a_session_is_not_on_its_tape(tmp_path: Path) -> None:
    async with recorded(Gateway(sources()), tmp_path / "tape") as gateway, gateway.open(TASK) as session:
        await session.call(call("add", a=1))
    assert session.id not in (tmp_path / "tape" / "tape.jsonl").read_text()


async def test_a_session_that_was_refused_is_refused_again_in_the_same_words(tmp_path: Path) -> None:
    wanting = Task(tools=("sub",))
    async with recorded(Gateway(sources()), tmp_path / "tape") as gateway:
        with pytest.raises(SessionError, match="no tool named 'sub'"):
            await gateway.begin(wanting)
    async with Replay(tmp_path / "tape") as replay:
        with pytest.raises(SessionError, match="no tool named 'sub'"):
            await replay.begin(wanting)


async def test_a_turn_that_nobody_could_answer_is_refused_again(tmp_path: Path) -> None:
    async with recorded(counting(), tmp_path / "tape") as gateway, gateway.open() as session:
        with pytest.raises(SessionError, match="no feedback interaction"):
            await session.feedback([])
        before = await session.call(call("count"))
    async with Replay(tmp_path / "tape") as replay, replay.open() as session:
        with pytest.raises(SessionError, match="no feedback interaction"):
            await session.feedback([])
        assert await session.call(call("count")) == before


async def test_a_task_that_differs_is_told_where(tmp_path: Path) -> None:
    async with recorded(Gateway(sources()), tmp_path / "tape") as gateway, gateway.open(TASK):
        pass
    async with Replay(tmp_path / "tape") as replay:
        with pytest.raises(ReplayError, match="The task of that id differs in: feedback_args"):
            await replay.begin(Task("row-7", feedback="gsm8k", feedback_args={"ground_truth": "5"}))
        async with replay.open(Task("row-7", None, {}, "gsm8k", {"ground_truth": "4"}, ttl_s=5.0)) as session:
            assert session.remaining_s == pytest.approx(5, abs=1)


async def test_a_question_after_the_last_recorded_one_is_told_that_the_recording_ends(tmp_path: Path) -> None:
    async with recorded(counting(), tmp_path / "tape") as gateway, gateway.open() as session:
        await session.call(call("count"))
    async with Replay(tmp_path / "tape") as replay, replay.open() as session:
        await session.call(call("count"))
        with pytest.raises(ReplayError, match=r"after 1 questions: count.* There the recorded sessions end"):
            await session.call(call("count"))


async def test_who_asks_is_part_of_the_question(tmp_path: Path) -> None:
    async with recorded(Gateway(sources()), tmp_path / "tape") as gateway, gateway.open(TASK) as session:
        await session.call(call("count"))
    async with Replay(tmp_path / "tape") as replay, replay.open(TASK) as session:
        with pytest.raises(ReplayError):
            await session.call(call("count"), Context(audience="loop"))


async def test_siblings_at_once_take_one_answer_each_and_give_it_back_when_they_close(tmp_path: Path) -> None:
    async with recorded(counting(), tmp_path / "tape") as gateway:
        for _ in range(2):
            async with gateway.open() as session:
                await session.call(call("count"))
    async with Replay(tmp_path / "tape") as replay:
        one, other, third = [await replay.begin(Task()) for _ in range(3)]
        assert [(await session.call(call("count"))).text for session in (other, one)] == ["2", "1"]
        with pytest.raises(ReplayError, match=r"was recorded 2 times, and open sessions .* hold every answer"):
            await third.call(call("count"))
        await one.close()
        assert (await third.call(call("count"))).text == "1"


async def test_a_sibling_that_does_as_another_did_is_answered_as_that_one_was(tmp_path: Path) -> None:
    async with recorded(counting(), tmp_path / "tape") as gateway:
        for step in (1, 2):
            async with gateway.open() as session:
                await session.call(call("count", step=step))
                await session.call(call("count", step=9))
    async with Replay(tmp_path / "tape") as replay, replay.open() as one, replay.open() as other:
        assert [(await one.call(call("count", step=step))).text for step in (2, 9)] == ["3", "4"]
        assert [(await other.call(call("count", step=step))).text for step in (1, 9)] == ["1", "2"]


async def test_a_message_refused_in_part_takes_nothing_and_may_be_asked_again(tmp_path: Path) -> None:
    batch = [call("count"), call("count", step=2)]
    async with recorded(counting(), tmp_path / "tape") as gateway, gateway.open() as session:
        before = await session.calls(batch)
    async with Replay(tmp_path / "tape") as replay, replay.open() as session:
        with pytest.raises(ReplayError):
            await session.calls([batch[0], call("count", step=3)])
        assert await session.calls(batch) == before


async def test_a_call_whose_caller_went_away_is_on_the_tape_as_cancelled(tmp_path: Path) -> None:
    async def hang() -> None:
        """Never answers."""
        await anyio.sleep_forever()

    gateway = recorded(Gateway([Source("hang", NativeToolset([FunctionTool(hang)]))]), tmp_path / "tape")
    with anyio.fail_after(10):
        async with gateway, gateway.open() as session, anyio.create_task_group() as tasks:
            tasks.start_soon(session.call, call("hang"))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    async with Replay(tmp_path / "tape") as replay, replay.open() as session:
        assert (await session.call(call("hang"))).outcome is Outcome.CANCELLED


async def test_a_session_that_expires_ends_on_the_tape_too(tmp_path: Path) -> None:
    with anyio.fail_after(20):
        async with recorded(counting(), tmp_path / "tape") as gateway:
            session = await gateway.begin(Task(ttl_s=0.01))
            assert gateway.sessions[session.id] is session
            await until(lambda: not gateway.sessions)
            await until(lambda: describe(tmp_path / "tape").closed == 1)


async def test_tools_that_come_while_the_tape_runs_are_offered_by_it(tmp_path: Path) -> None:
    first, both = sources()[:1], [*sources(), *counting()._first]
    async with recorded(Gateway(first), tmp_path / "tape") as gateway:
        async with gateway.open():
            pass
        await gateway.reload([gateway.sources[0], *both[-1:]])
        async with gateway.open(Task("later")) as session:
            names = [spec.name for spec in session.specs]
    async with Replay(tmp_path / "tape") as replay, replay.open(Task("later")) as session:
        assert [spec.name for spec in session.specs] == names
        assert set(names) <= {spec.name for spec in replay.specs}
        async with replay.open() as earlier:
            assert "count" in names and len(earlier.specs) <= len(names)


CALL = b'{"kind":"call"'
RECORD = """
import os, sys, anyio
from pathlib import Path
from gateway.tape import recorded
from gateway.types import Task, ToolCall
from tests.tape.test_tape_life import counting
{limit}
async def main():
    async with recorded(counting(), Path(sys.argv[1])) as gateway:
        session = await gateway.begin(Task())
        for step in range(20):
            await session.call(ToolCall("1", "count", '{{"step": %d}}' % step))
        {end}
anyio.run(main)
"""


def in_another_process(tape: Path, *, limit: str = "", end: str = "pass") -> subprocess.CompletedProcess[str]:
    code = RECORD.format(limit=limit, end=end)
    return subprocess.run([sys.executable, "-c", code, str(tape)], capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tape = tmp_path_factory.mktemp("killed") / "tape"
    done = in_another_process(tape, end="os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    return tape


async def test_what_was_answered_before_a_kill_is_on_the_tape(killed: Path) -> None:
    summary = describe(killed)
    assert (summary.calls, summary.sessions, summary.closed, summary.torn) == (20, 1, 0, False)
    assert "1 cut short" in str(summary)
    async with Replay(killed) as replay, replay.open() as session:
        answers = [(await session.call(call("count", step=step))).text for step in range(20)]
    assert answers == [str(count) for count in range(1, 21)]


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tape_cut_anywhere_keeps_every_whole_line(
    killed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = (killed / "tape.jsonl").read_bytes()
    header = whole.index(b"\n") + 1
    cut = whole[: data.draw(st.integers(header, len(whole)))]
    tape = tmp_path_factory.mktemp("cut")
    (tape / "tape.jsonl").write_bytes(cut)
    *_, last = cut.splitlines()
    torn = last + b"\n" not in whole
    calls = sum(line.startswith(CALL) for line in cut.splitlines()) - (torn and last.startswith(CALL))
    summary = describe(tape)
    assert (summary.calls, summary.torn) == (calls, torn)


def test_a_disk_that_is_really_full_leaves_a_tape_that_can_be_replayed(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))"
    done = in_another_process(tmp_path / "tape", limit=limit)
    assert done.returncode == 1 and "has stopped: File too large" in done.stderr
    summary = describe(tmp_path / "tape")
    assert 0 < summary.calls < 20 and not summary.torn


async def test_a_tape_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    async with recorded(Gateway(sources()), tmp_path / "tape") as gateway, gateway.open(TASK) as session:
        await session.call(call("several"))
    for line in lines(tmp_path / "tape"):
        for part in line.get("answer", {}).get("parts", ()):
            part.update({"blob": "../../secret"} if "blob" in part else {})
        with (tmp_path / "forged.jsonl").open("a") as forged:
            forged.write(json.dumps(line) + "\n")
    (tmp_path / "forged.jsonl").replace(tmp_path / "tape" / "tape.jsonl")
    with pytest.raises(ReplayError, match="is missing"):
        async with Replay(tmp_path / "tape"):
            pass
