"""Recording: crashes, full disks, cancelled calls, expired sessions, and gateways in other processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.client import RemoteGateway
from gateway.errors import ConfigError, ReplayError, SessionError
from gateway.gateway import Gateway
from gateway.native.function import FunctionTool
from gateway.native.native_toolset import NativeToolset
from gateway.session_protocols import Reward
from gateway.tape import RecordedGateway, ReplayGateway, record_gateway
from gateway.tape.tape_file import load_tape
from gateway.tool_table import Source
from gateway.toolset import PLANTED, SessionWrapper, ToolsetWrapper
from gateway.types import Context, Outcome, Task, ToolCall
from tests.http.api_client import ApiClient
from tests.live_server import live_server_async
from tests.toolset_conformance.sample_tools import ALL_PARTS, PNG, make_judge, sample_sources
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
TASK = Task("row-7", feedback="gsm8k", feedback_args={"ground_truth": "4"})


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("id", name, json.dumps(arguments))


def counting_gateway() -> Gateway:
    steps: list[int] = []

    def count(step: int = 1) -> int:
        """Counts the calls of all rollouts."""
        steps.append(step)
        return len(steps)

    return Gateway([Source("count", NativeToolset([FunctionTool(count)]))])


def read_lines(tape: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tape / "tape.jsonl").read_text().splitlines()]


async def test_recording_is_replayed_over_http(tmp_path: Path) -> None:
    async with record_gateway(Gateway(sample_sources()), tmp_path / "tape") as gateway, gateway.open(TASK) as session:
        recorded = await session.calls([call("add", a=1), call("remember", word="x"), call("several")])
        feedback = await session.feedback([{"role": "assistant", "content": "#### 4"}])
    async with (
        live_server_async(lambda: ReplayGateway(tmp_path / "tape")) as server,
        RemoteGateway(server.url) as remote,
    ):
        async with remote.open(TASK) as session:
            assert session.name == "gsm8k"
            assert await session.calls([call("add", a=1), call("remember", word="x"), call("several")]) == recorded
            assert [type(part) for part in recorded[2].parts] == [type(part) for part in ALL_PARTS]
            assert await session.feedback([{"role": "assistant", "content": "#### 4"}]) == feedback
            with pytest.raises(ReplayError, match=r"task 'row-7' after 4 requests: add\(.*9.*\) is not on the tape"):
                await session.call(call("add", a=9))
        with pytest.raises(ReplayError, match=r"recorded for exactly this task 'row-8'.*recorded tasks: 'row-7'"):
            await remote.begin(Task("row-8"))
    assert [blob.read_bytes() for blob in (tmp_path / "tape" / "blobs").iterdir()].count(PNG) == 1


async def test_errors_are_replayed_and_a_request_that_differs_in_any_part_takes_no_answer(tmp_path: Path) -> None:
    batch = [call("count"), call("count", step=2)]
    async with record_gateway(counting_gateway(), tmp_path / "tape") as gateway:
        with pytest.raises(SessionError, match="no tool named 'sub'"):
            await gateway.begin(Task(tools=("sub",)))
        async with gateway.open() as session:
            with pytest.raises(SessionError, match="no feedback interaction"):
                await session.feedback([])
            recorded = await session.calls(batch)
    assert session.id not in (tmp_path / "tape" / "tape.jsonl").read_text()
    async with ReplayGateway(tmp_path / "tape") as replay:
        with pytest.raises(SessionError, match="no tool named 'sub'"):
            await replay.begin(Task(tools=("sub",)))
        with pytest.raises(ReplayError, match="differs in: feedback_args"):
            await replay.begin(Task(feedback_args={"ground_truth": "5"}))
        async with replay.open() as session:
            with pytest.raises(SessionError, match="no feedback interaction"):
                await session.feedback([])
            for wrong, audience in (([batch[0], call("count", step=3)], "policy"), (batch, "loop")):
                with pytest.raises(ReplayError):
                    await session.calls(wrong, Context(audience=audience))
            assert await session.calls([batch[0], ToolCall("other", "count", '{ "step" :2}')]) == recorded
            with pytest.raises(ReplayError, match=r"after 3 requests: count.* the recorded sessions end"):
                await session.call(call("count"))
    with pytest.raises(ConfigError, match="there is a recording already"):
        await record_gateway(counting_gateway(), tmp_path / "tape").__aenter__()


async def test_remote_gateway_can_be_recorded(tmp_path: Path) -> None:
    async with (
        live_server_async(lambda: Gateway(sample_sources())) as server,
        RecordedGateway(RemoteGateway(server.url), tmp_path / "tape") as gateway,
        gateway.open(TASK) as session,
    ):
        recorded = await session.calls([call("add", a=1), call("several")])
    async with ReplayGateway(tmp_path / "tape") as replay, replay.open(TASK) as session:
        assert session.feedback_session is not None and session.feedback_session.name == "gsm8k"
        assert await session.calls([call("add", a=1), call("several")]) == recorded


async def test_recorded_sessions_close_and_expire_over_http_and_abandoned_ones_are_not_graded(tmp_path: Path) -> None:
    backend = SimpleNamespace(finish_s=1.0)  # as of a grader

    def make() -> Gateway:
        sources = [Source("judge", NativeToolset([make_judge()]), backend=backend)]
        return record_gateway(Gateway(sources), tmp_path / "tape")

    async with live_server_async(make) as server:
        client = ApiClient(server.url)
        for query, graded in (("", [1.0]), ("?abandoned=true", [])) * 2:
            closed = await client("DELETE", f"/v1/sessions/{await client.begin()}{query}")
            assert closed.status_code == 200 and [reward["value"] for reward in closed.json()["rewards"]] == graded
            expired = await client.begin(ttl_s=0.01)
            await wait_until(lambda id=expired: id not in server.gateway.sessions)
    lines = read_lines(tmp_path / "tape")
    assert [line["rewards"] for line in lines if line["kind"] == "finish"] == [{"judge": 1.0}] * 2
    assert [line["session"] for line in lines if line["kind"] == "close"] == [*range(1, 9)]


async def test_planted_rewards_are_counted_in_replay_as_in_the_recording(tmp_path: Path) -> None:
    class Grading(SessionWrapper):
        async def finish(self) -> Mapping[str, float]:
            return {"grade": 0.5, f"grade{PLANTED}": 1.0}

    class GradingToolset(ToolsetWrapper):
        def open(self, task: Task) -> Grading:
            return Grading(self.inner.open(task), self)

    def make() -> Gateway:
        return Gateway([Source("grade", GradingToolset(NativeToolset([make_judge()])))])

    async with record_gateway(make(), tmp_path / "tape") as gateway, gateway.open() as recorded:
        assert await recorded.finish() == {"grade": 0.5}
    async with ReplayGateway(tmp_path / "tape") as replay, replay.open() as replayed:
        assert await replayed.finish() == {"grade": 0.5}
    assert replayed.rewards == recorded.rewards
    assert replayed.rewards == [Reward("grade", 0.5, "end"), Reward(f"grade{PLANTED}", 1.0, "count")]


async def test_recorded_rollout_that_fails_is_not_graded(tmp_path: Path) -> None:
    source = Source("judge", NativeToolset([make_judge()]), backend=SimpleNamespace(finish_s=1.0))
    async with record_gateway(Gateway([source]), tmp_path / "tape") as gateway:
        with pytest.raises(ValueError, match="the rollout fails"):
            async with gateway.open() as session:
                raise ValueError("the rollout fails")
        assert session.rewards == []
    async with ReplayGateway(tmp_path / "tape") as replay:
        session = await replay.begin(Task())
        with pytest.raises(ReplayError, match="the final rewards is not on the tape"):
            await session.finish()


async def test_concurrent_siblings_take_one_answer_each_until_they_close(tmp_path: Path) -> None:
    async with record_gateway(counting_gateway(), tmp_path / "tape") as gateway:
        for _ in range(2):
            async with gateway.open() as session:
                await session.call(call("count"))
    async with ReplayGateway(tmp_path / "tape") as replay:
        first, second, third = [await replay.begin(Task()) for _ in range(3)]
        assert [(await session.call(call("count"))).text for session in (second, first)] == ["2", "1"]
        with pytest.raises(ReplayError, match=r"was recorded 2 times, and open sessions .* hold every answer"):
            await third.call(call("count"))
        await first.close()
        assert (await third.call(call("count"))).text == "1"


async def test_abandoned_call_is_recorded_as_cancelled(tmp_path: Path) -> None:
    async def hang() -> None:
        """Never answers."""
        await anyio.sleep_forever()

    gateway = record_gateway(Gateway([Source("hang", NativeToolset([FunctionTool(hang)]))]), tmp_path / "tape")
    with anyio.fail_after(60):
        async with gateway, gateway.open() as session, anyio.create_task_group() as tasks:
            tasks.start_soon(session.call, call("hang"))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    async with ReplayGateway(tmp_path / "tape") as replay, replay.open() as session:
        assert (await session.call(call("hang"))).outcome is Outcome.CANCELLED


async def test_tools_added_during_the_recording_are_offered_in_replay(tmp_path: Path) -> None:
    initial_sources, all_sources = sample_sources()[:1], [*sample_sources(), *counting_gateway()._initial_sources]
    async with record_gateway(Gateway(initial_sources), tmp_path / "tape") as gateway:
        async with gateway.open():
            pass
        await gateway.reload([gateway.sources[0], *all_sources[-1:]])
        async with gateway.open(Task("later")) as session:
            tool_names = [spec.name for spec in session.specs]
    async with ReplayGateway(tmp_path / "tape") as replay, replay.open(Task("later")) as session:
        assert [spec.name for spec in session.specs] == tool_names
        assert set(tool_names) <= {spec.name for spec in replay.specs}
        async with replay.open() as earlier:
            assert "count" in tool_names and len(earlier.specs) <= len(tool_names)


CALL_PREFIX = b'{"kind":"call"'
RECORD_SCRIPT = """
import os, sys, anyio
from pathlib import Path
from gateway.tape import record_gateway
from gateway.types import Task, ToolCall
from tests.tape.test_recording import counting_gateway
{limit}
async def main():
    async with record_gateway(counting_gateway(), Path(sys.argv[1])) as gateway:
        session = await gateway.begin(Task())
        for step in range(20):
            await session.call(ToolCall("1", "count", '{{"step": %d}}' % step))
        {end}
anyio.run(main)
"""


def record_in_process(tape: Path, *, limit: str = "", end: str = "pass") -> subprocess.CompletedProcess[str]:
    code = RECORD_SCRIPT.format(limit=limit, end=end)
    return subprocess.run([sys.executable, "-c", code, str(tape)], capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.fixture(scope="module")
def killed_tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tape = tmp_path_factory.mktemp("killed") / "tape"
    process = record_in_process(tape, end="os.kill(os.getpid(), 9)")
    assert process.returncode == -signal.SIGKILL
    return tape


async def test_answers_before_a_kill_are_on_the_tape(killed_tape: Path) -> None:
    tape = load_tape(killed_tape)
    assert (len(tape.sessions), tape.closed, tape.is_truncated) == (1, set(), False)
    async with ReplayGateway(killed_tape) as replay, replay.open() as session:
        answers = [(await session.call(call("count", step=step))).text for step in range(20)]
    assert answers == [str(count) for count in range(1, 21)]


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tape_truncated_anywhere_keeps_all_whole_lines(
    killed_tape: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = (killed_tape / "tape.jsonl").read_bytes()
    header = content.index(b"\n") + 1
    cut_content = content[: data.draw(st.integers(header, len(content)))]
    tape = tmp_path_factory.mktemp("cut")
    (tape / "tape.jsonl").write_bytes(cut_content)
    *_, last = cut_content.splitlines()
    is_truncated = last + b"\n" not in content
    calls = sum(line.startswith(CALL_PREFIX) for line in cut_content.splitlines()) - (
        is_truncated and last.startswith(CALL_PREFIX)
    )
    loaded = load_tape(tape)
    entries = sum(len(session.entries) for session in loaded.sessions.values())
    assert (entries, loaded.is_truncated) == (calls, is_truncated)


async def test_blob_path_outside_the_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    async with record_gateway(Gateway(sample_sources()), tmp_path / "tape") as gateway, gateway.open(TASK) as session:
        await session.call(call("several"))
    for line in read_lines(tmp_path / "tape"):
        for part in line.get("answer", {}).get("parts", ()):
            part.update({"data": "../../secret"} if "data" in part else {})
        with (tmp_path / "forged.jsonl").open("a") as forged:
            forged.write(json.dumps(line) + "\n")
    (tmp_path / "forged.jsonl").replace(tmp_path / "tape" / "tape.jsonl")
    with pytest.raises(ReplayError, match="is missing"):
        async with ReplayGateway(tmp_path / "tape"):
            pass
