"""/v1/sessions: begun, looked at, held, closed, expired; and never another's."""

from __future__ import annotations

import json
import time

import anyio
import httpx2

from gateway.gateway import Gateway
from gateway.media import data_uri
from gateway.native.toolset import NativeToolset
from gateway.table import Source
from gateway.types import Image
from tests.doors.kit import PNG, Judge, judge
from tests.http.rooms import Caller, Watched, rooms
from tests.served import Served, served, until

SOLVED = [{"role": "assistant", "content": "#### 42"}]


async def test_a_session_says_what_it_offers_and_until_when(ask: Caller) -> None:
    answer = await ask("POST", "/v1/sessions", {"tools": ["add", "judge"], "feedback": "scripted", "ttl_s": 60})
    begun = answer.json()
    assert answer.status_code == 201 and len(begun["id"]) >= 32
    assert [tool["function"]["name"] for tool in begun["tools"]] == ["add", "judge"]
    assert begun["feedback"] == "scripted"
    assert 0 < begun["expires_at"] - time.time() <= 61


async def test_a_session_lives_for_an_hour_unless_it_says_otherwise(ask: Caller) -> None:
    begun = (await ask("POST", "/v1/sessions", {})).json()
    assert 3500 < begun["expires_at"] - time.time() <= 3600


async def test_an_interaction_may_be_named_with_its_arguments(ask: Caller) -> None:
    id = await ask.begin(feedback={"name": "gsm8k", "ground_truth": "42"})
    heard = (await ask("POST", f"/v1/sessions/{id}/feedback", {"messages": SOLVED})).json()
    assert heard == {
        "done": True,
        "message": "Your response is correct!",
        "score": 1.0,
        "metadata": {},
        "outcome": "ok",
        "reason": None,
    }


async def test_arguments_of_an_interaction_may_stand_apart(ask: Caller) -> None:
    id = await ask.begin(feedback="gsm8k", feedback_args={"ground_truth": "41"})
    heard = (await ask("POST", f"/v1/sessions/{id}/feedback", {"messages": SOLVED})).json()
    assert (heard["done"], heard["score"]) == (False, 0.0)


async def test_feedback_may_show_pictures(ask: Caller) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_uri(Image(PNG))}}
    replies = [{"say": [{"type": "text", "text": "look"}, picture]}]
    id = await ask.begin(feedback="scripted", feedback_args={"replies": replies})
    heard = (await ask("POST", f"/v1/sessions/{id}/feedback", {"messages": SOLVED})).json()
    assert heard["message"].startswith("look") and len(heard["content"]) == 2


async def test_a_gateway_without_interactions_says_so() -> None:
    def bare() -> Gateway:
        return Gateway([source for source in rooms() if source.key != "feedback"])

    async with served(bare) as at:
        ask = Caller(at.url)
        id = await ask.begin()
        answer = await ask("POST", f"/v1/sessions/{id}/feedback", {"messages": SOLVED})
    assert answer.status_code == 409 and "interaction" in answer.json()["error"]["message"]


async def test_looking_at_a_session_shows_its_state(ask: Caller) -> None:
    id = await ask.begin(tools=["judge"], task_id="row 7", create={"judge": {"first": "so"}})
    await ask.call(id, "judge", '{"word": "good"}')
    state = (await ask("GET", f"/v1/sessions/{id}")).json()
    assert state["id"] == id and state["task_id"] == "row 7"
    assert state["tools"] == ["judge"] and state["calls"] == 1 and state["strict"] is False
    assert state["rewards"] == [{"source": "judge", "value": 0.25, "kind": "call", "call_id": "c1"}]


async def test_closing_gives_the_rewards_and_forgets_the_session(ask: Caller, at: Served) -> None:
    id = await ask.begin(tools=["judge"])
    await ask.call(id, "judge", '{"word": "good"}')
    closed = (await ask("DELETE", f"/v1/sessions/{id}")).json()
    assert [(one["value"], one["kind"]) for one in closed["rewards"]] == [(0.25, "call"), (2.0, "end")]
    assert id not in at.gateway.sessions
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/calls"), ("POST", "/feedback")):
        gone = await ask(method, f"/v1/sessions/{id}{path}", {"tool_calls": []} if method == "POST" else None)
        assert gone.status_code == 404 and gone.json()["error"]["type"] == "not_found"


async def test_a_session_expires_when_nobody_uses_it(ask: Caller, at: Served) -> None:
    id = await ask.begin(ttl_s=0.05)
    await until(lambda: id not in at.gateway.sessions)
    assert (await ask("GET", f"/v1/sessions/{id}")).status_code == 404


async def test_a_session_does_not_expire_under_a_running_call(ask: Caller, at: Served, watched: Watched) -> None:
    id = await ask.begin(ttl_s=0.05)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask.call, id, "hang")
        await until(watched.started.is_set)
        assert at.gateway.sessions[id].remaining_s == 0.05
        tasks.cancel_scope.cancel()
    await until(lambda: id not in at.gateway.sessions)


async def test_closing_a_session_answers_the_calls_that_run_in_it(ask: Caller, watched: Watched) -> None:
    id = await ask.begin()
    answers = []

    async def call() -> None:
        answers.append(await ask.call(id, "hang"))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(watched.started.is_set)
            await ask("DELETE", f"/v1/sessions/{id}")
    assert answers[0]["results"][0]["outcome"] == "cancelled" and watched.cancelled.is_set()


async def test_a_held_session_dies_with_its_holder(ask: Caller, at: Served) -> None:
    async with (
        httpx2.AsyncClient(base_url=at.url, trust_env=False) as http,
        http.stream("POST", "/v1/sessions?hold=true", content=b"{}") as held,
    ):
        assert held.status_code == 201 and held.headers["content-type"] == "application/x-ndjson"
        lines = held.aiter_lines()
        begun = json.loads(await anext(lines))
        assert begun["expires_at"] is None and begun["id"] in at.gateway.sessions
        said = await ask.call(begun["id"], "add", '{"a": 1}')
        assert said["messages"][0]["content"] == "1"
        await lines.aclose()
    await until(lambda: begun["id"] not in at.gateway.sessions)


async def test_a_held_session_that_is_closed_ends_the_answer_with_its_rewards(ask: Caller, at: Served) -> None:
    async with (
        httpx2.AsyncClient(base_url=at.url, trust_env=False) as http,
        http.stream("POST", "/v1/sessions?hold=true", content=b'{"tools": ["judge"]}') as held,
    ):
        lines = held.aiter_lines()
        begun = json.loads(await anext(lines))
        await ask("DELETE", f"/v1/sessions/{begun['id']}")
        rest = [json.loads(line) async for line in lines if line]
    assert rest == [{"id": begun["id"], "rewards": [{"source": "judge", "value": 1.0, "kind": "end", "call_id": None}]}]


async def test_one_sessions_id_opens_no_other(ask: Caller, at: Served) -> None:
    one, other = await ask.begin(), await ask.begin()
    await ask.call(one, "remember", '{"word": "mine"}')
    said = await ask.call(other, "remember", '{"word": "yours"}')
    assert said["messages"][0]["content"] == '["yours"]'
    async with Gateway(rooms()) as elsewhere, elsewhere.open() as session:
        assert (await ask("GET", f"/v1/sessions/{session.id}")).status_code == 404


async def test_sessions_that_were_opened_in_process_cannot_be_reached(ask: Caller, at: Served) -> None:
    id = await ask.begin()
    found = at.gateway.sessions[id]
    at.gateway.sessions["in-process"] = found
    try:
        assert (await ask("GET", "/v1/sessions/in-process")).status_code == 404
    finally:
        del at.gateway.sessions["in-process"]


async def test_too_many_sessions_are_refused_until_one_closes() -> None:
    async with served(lambda: Gateway(rooms(), most_sessions=1)) as at:
        ask = Caller(at.url)
        id = await ask.begin()
        refused = await ask("POST", "/v1/sessions", {})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "too_many_sessions"
        await ask("DELETE", f"/v1/sessions/{id}")
        await ask.begin()


async def test_what_cannot_be_opened_says_why(ask: Caller) -> None:
    for wanted, status, message in (
        ({"tools": ["sub"]}, 409, "no tool named 'sub'"),
        ({"feedback": "nobody"}, 409, "no interaction named 'nobody'"),
        ({"tool": ["add"]}, 422, "Extra inputs are not permitted"),
        ({"ttl_s": -1}, 422, "greater than 0"),
        ({"ttl_s": "60"}, 422, "valid number"),
        ({"strict": 1}, 422, "valid boolean"),
        ({"tools": "add"}, 422, "valid array"),
        ({"form": None}, 422, "Input should be 'openai' or 'spec'"),
        ({"feedback": {"ground_truth": 1}}, 422, "valid string"),
    ):
        answer = await ask("POST", "/v1/sessions", wanted)
        assert answer.status_code == status and message in answer.json()["error"]["message"]


async def test_everything_is_released_when_the_server_stops() -> None:
    tool = judge()
    kept: Judge = tool.tool  # type: ignore[assignment]

    def make() -> Gateway:
        return Gateway([Source("judge", NativeToolset([tool]))])

    async with served(make) as at:
        ask = Caller(at.url)
        await ask.begin()
        await ask.begin()
        assert kept.released == []
    assert len(kept.released) == 2
