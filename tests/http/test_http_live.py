"""What happens now, and what was recorded, as the gateway's page asks for it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from gateway.gateway import Gateway
from gateway.http.live import BEHIND, PAST, SHOWN, Live, digest
from gateway.http.settings import Settings
from gateway.session import Observed
from gateway.tape import Replay, recorded
from gateway.types import Image, Text, ToolCall, ToolResult
from tests.http.rooms import Caller, Watched, rooms
from tests.served import Served, served, until


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The lines of the live calls, as they come."""

    async def lines(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
        async with aclosing(answer.aiter_lines()) as raw:
            async for line in raw:
                if line:
                    yield json.loads(line)

    http = httpx2.AsyncClient(trust_env=False, timeout=20)
    async with http, http.stream("GET", f"{url}/v1/live/calls") as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        async with aclosing(lines(answer)) as told:
            yield told


async def following(lines: AsyncIterator[dict[str, Any]], tool: str, id: str) -> dict[str, Any]:
    """The next call of a tool in a session."""
    with anyio.fail_after(10):
        async for line in lines:
            found: dict[str, Any] = line.get("call", {})
            if (found.get("tool"), found.get("session")) == (tool, digest(id)):
                return found
    raise AssertionError("the stream has ended")


async def test_a_watcher_hears_of_a_call_that_ended_before_and_of_one_that_ends_now(ask: Caller, at: Served) -> None:
    id = await ask.begin()
    await ask.call(id, "pick", {"colour": "before"})
    async with watching(at.url) as lines:
        before = await following(lines, "pick", id)
        await ask.call(id, "fails")
        now = await following(lines, "fails", id)
    assert json.loads(before["arguments"]) == {"colour": "before"} and before["outcome"] == "ok"
    assert before["parts"] == [{"type": "text", "text": "before None 1"}]
    assert now["outcome"] == "error" and now["reason"]


async def test_a_call_under_way_is_seen_until_it_ends(ask: Caller, at: Served, watched: Watched) -> None:
    id = await ask.begin()
    async with watching(at.url) as lines, anyio.create_task_group() as tasks:
        tasks.start_soon(ask.call, id, "hang")
        with anyio.fail_after(10):
            async for line in lines:
                if line.get("running"):
                    break
            assert [one["tool"] for one in line["running"]] == ["hang"] and line["running"][0]["session"] == digest(id)
            state = (await ask("GET", "/v1/live/sessions")).json()["data"]
            assert ["hang"] in [one["running"] for one in state]
            await ask("DELETE", f"/v1/live/sessions/{digest(id)}")
            async for line in lines:
                if line.get("running") == []:
                    break
        tasks.cancel_scope.cancel()


async def test_sessions_are_listed_without_what_would_open_them(ask: Caller) -> None:
    id = await ask.begin(id="task-9")
    await ask.call(id, "judge", {"word": "well"})
    listed = await ask("GET", "/v1/live/sessions")
    assert id not in listed.text
    (mine,) = [one for one in listed.json()["data"] if one["id"] == digest(id)]
    assert (mine["task_id"], mine["calls"], mine["rewards"][0]["value"]) == ("task-9", 1, 0.25)
    assert 0 <= mine["age_s"] < 20 and mine["expires_in_s"] > 0
    assert (await ask("GET", f"/v1/sessions/{mine['id']}")).status_code == 404


async def test_a_session_is_closed_by_its_digest(ask: Caller, at: Served) -> None:
    id = await ask.begin()
    closed = await ask("DELETE", f"/v1/live/sessions/{digest(id)}")
    assert closed.status_code == 200 and id not in at.gateway.sessions
    assert (await ask("DELETE", f"/v1/live/sessions/{digest(id)}")).status_code == 404


async def test_a_server_that_stops_lets_its_watchers_go() -> None:
    async with served(lambda: Gateway(rooms())) as at, watching(at.url) as lines:
        assert "running" in await anext(lines)
        at.stop()
        with anyio.fail_after(4):  # less than answers under way are waited for
            assert [line async for line in lines] == []


async def test_a_watcher_that_went_away_is_forgotten() -> None:
    async with served(lambda: Gateway(rooms())) as at:
        async with watching(at.url) as lines:
            await anext(lines)
        (live,) = [one.__self__ for one in at.gateway.observers if isinstance(getattr(one, "__self__", None), Live)]
        await until(lambda: not live._watchers)


def observed(text: str = "x", arguments: str = "{}") -> Observed:
    parts = (Text(text), Image(b"secret", "image/png"))
    return Observed("id", ToolCall("1", "tool", arguments), None, ToolResult(parts))


def test_only_so_much_is_kept_of_a_call_and_of_the_past() -> None:
    live = Live(Gateway([]), anyio.Event())
    for _ in range(PAST + 5):
        live.observe(observed("y" * 10 * SHOWN, "z" * 10 * SHOWN))
    assert len(live.past) == PAST
    assert len(live.past[0]["arguments"]) == len(live.past[0]["parts"][0]["text"]) == SHOWN
    assert live.past[0]["parts"][1] == {"type": "image", "mime": "image/png"}


async def test_a_slow_watcher_delays_nobody_and_is_told_what_it_missed() -> None:
    live = Live(Gateway([]), anyio.Event())
    with live.watch() as heard:
        for _ in range(BEHIND + 3):
            live.observe(observed())
        for _ in range(BEHIND):
            assert "missed" not in heard.receive_nowait()
        live.observe(observed())
        assert heard.receive_nowait()["missed"] == 3
    live.forget()
    live.observe(observed())


@pytest.fixture
async def taped(tmp_path: Path) -> AsyncIterator[Caller]:
    async with served(lambda: recorded(Gateway(rooms()), tmp_path / "first"), Settings(port=0, tapes=tmp_path)) as at:
        yield Caller(at.url)


async def test_what_is_on_a_tape_can_be_looked_at_while_it_runs(taped: Caller) -> None:
    id = await taped.begin(id="task-1", feedback="scripted")
    await taped.call(id, "several")
    await taped("POST", f"/v1/sessions/{id}/feedback", {"messages": [{"role": "assistant", "content": "hm"}]})
    await taped("DELETE", f"/v1/sessions/{id}")
    (listed,) = (await taped("GET", "/v1/tapes")).json()["data"]
    tape = (await taped("GET", "/v1/tapes/first")).json()
    assert listed["name"] == "first" and tape["summary"]["tools"] == {"several": 1} and tape["start"] == 0
    (session,) = tape["sessions"]
    assert (session["task_id"], session["feedback"], session["closed"]) == ("task-1", "scripted", True)
    call, turn, end = session["entries"]
    assert (call["name"], call["outcome"], call["parts"][1]["mime"]) == ("several", "ok", "image/png")
    assert (turn["kind"], turn["parts"][0]["text"], end["kind"]) == ("feedback", "go on", "finish")
    assert (await taped("GET", "/v1/tapes/first?from=1")).json()["sessions"] == []


async def test_a_gateway_that_plays_a_tape_is_watched_like_any_other(taped: Caller, tmp_path: Path) -> None:
    await taped.call(await taped.begin(id="task-1"), "facts")
    async with served(lambda: Replay(tmp_path / "first"), Settings(port=0, tape=tmp_path / "first")) as at:
        ask = Caller(at.url)
        id = await ask.begin(id="task-1")
        await ask.call(id, "facts")
        async with watching(at.url) as lines:
            assert (await following(lines, "facts", id))["outcome"] == "ok"
        (session,) = (await ask("GET", "/v1/live/sessions")).json()["data"]
        assert (session["task_id"], session["calls"]) == ("task-1", 1)
        assert [one["name"] for one in (await ask("GET", "/v1/tapes")).json()["data"]] == ["first"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("none", 404), ("..%2F..%2Fetc", 404), ("first?from=-1", 422), ("first?from=1e9", 422), ("broken", 409)],
)
async def test_a_tape_that_is_not_there_or_damaged_is_a_clear_refusal(
    taped: Caller, tmp_path: Path, path: str, status: int
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tape.jsonl").write_text('{"kind": "other"}\n')
    answer = await taped("GET", f"/v1/tapes/{path}")
    assert answer.status_code == status and answer.json()["error"]["message"]
