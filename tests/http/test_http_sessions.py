"""Tests of /v1/sessions: opening, reading, holding, closing, expiry and isolation."""

from __future__ import annotations

import json
import time

import anyio
import httpx2

from gateway.gateway import Gateway
from gateway.session import GatewaySession
from tests.http.api_client import ApiClient, HangingTool, http_sources, tool_call
from tests.live_server import LiveServer, live_server_async
from tests.waiting import PATIENCE_S, wait_until

SOLVED = [{"role": "assistant", "content": "#### 42"}]


async def test_interaction_arguments_may_be_given_with_its_name(client: ApiClient) -> None:
    id = await client.begin(feedback={"name": "gsm8k", "ground_truth": "42"})
    feedback = (await client("POST", f"/v1/sessions/{id}/feedback", {"messages": SOLVED})).json()
    assert (feedback["done"], feedback["score"], feedback["outcome"]) == (True, 1.0, "ok")


async def test_feedback_without_interactions_is_a_conflict() -> None:
    def bare() -> Gateway:
        return Gateway([source for source in http_sources() if source.key != "feedback"])

    async with live_server_async(bare) as server:
        client = ApiClient(server.url)
        id = await client.begin()
        answer = await client("POST", f"/v1/sessions/{id}/feedback", {"messages": SOLVED})
    assert answer.status_code == 409 and "interaction" in answer.json()["error"]["message"]


async def test_closing_returns_rewards_and_removes_the_session(client: ApiClient, server: LiveServer) -> None:
    id = await client.begin(tools=["judge"])
    await client.call(id, "judge", '{"word": "good"}')
    closed = (await client("DELETE", f"/v1/sessions/{id}")).json()
    assert [(first["value"], first["kind"]) for first in closed["rewards"]] == [(0.25, "call"), (2.0, "end")]
    assert id not in server.gateway.sessions
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/calls"), ("POST", "/feedback")):
        gone = await client(method, f"/v1/sessions/{id}{path}", {"tool_calls": []} if method == "POST" else None)
        assert gone.status_code == 404 and gone.json()["error"]["type"] == "not_found"


async def test_state_of_a_session_has_what_was_called_in_any_form_and_its_rewards(client: ApiClient) -> None:
    id = await client.begin(tools=["judge"], id="row 7", ttl_s=60)
    calls, none = [tool_call("judge", {"word": "good"})], {"role": "assistant", "content": "hm", "tool_calls": None}
    for body in (calls, {"messages": [none, {"tool_calls": calls}]}, none):
        answer = (await client("POST", f"/v1/sessions/{id}/calls", body)).json()
        assert [item["reward"] for item in answer["results"]] == [0.25] * (body is not none)
    state = (await client("GET", f"/v1/sessions/{id}")).json()
    assert (state["task_id"], state["tools"], state["calls"], state["strict"]) == ("row 7", ["judge"], 2, False)
    assert state["rewards"] == [{"source": "judge", "value": 0.25, "kind": "call", "call_id": "c1"}] * 2
    assert 0 < state["expires_at"] - time.time() <= 61


async def test_session_does_not_expire_during_a_call(
    client: ApiClient, server: LiveServer, hanging: HangingTool
) -> None:
    id = await client.begin(ttl_s=PATIENCE_S)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.call, id, "hang")
        await wait_until(hanging.started.is_set)
        session = server.gateway.sessions[id]
        session.ttl_s = 0.05  # It could have expired before the call, with so little from the start.
        assert session.remaining_s == 0.05
        tasks.cancel_scope.cancel()
    await wait_until(lambda: id not in server.gateway.sessions)


async def test_held_session_closes_when_its_client_disconnects(client: ApiClient, server: LiveServer) -> None:
    async with (
        httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/sessions?hold=true", json={}) as held,
    ):
        assert held.status_code == 201 and held.headers["content-type"] == "application/x-ndjson"
        lines = held.aiter_lines()
        begun = json.loads(await anext(lines))
        assert begun["expires_at"] is None and begun["id"] in server.gateway.sessions
        response = await client.call(begun["id"], "add", '{"a": 1}')
        assert response["messages"][0]["content"] == "1"
        await lines.aclose()
    await wait_until(lambda: begun["id"] not in server.gateway.sessions)


async def test_held_session_says_at_its_end_that_its_rewards_are_missing(client: ApiClient, server: LiveServer) -> None:
    async with (
        httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/sessions?hold=true", json={}) as held,
    ):
        lines = held.aiter_lines()
        id = json.loads(await anext(lines))["id"]
        session = server.gateway.sessions[id]
        assert isinstance(session, GatewaySession)

        async def fail() -> dict[str, float]:
            raise RuntimeError("the grader is gone")

        session.finish = fail  # type: ignore[method-assign]
        assert (await client("DELETE", f"/v1/sessions/{id}")).status_code == 503
        last = [line async for line in lines if line][-1]
    assert json.loads(last)["error"]["type"] == "unavailable" and "rewards" in last


async def test_excess_sessions_are_refused_until_one_closes() -> None:
    async with live_server_async(lambda: Gateway(http_sources(), max_sessions=1)) as server:
        client = ApiClient(server.url)
        id = await client.begin()
        refused = await client("POST", "/v1/sessions", {})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "too_many_sessions"
        await client("DELETE", f"/v1/sessions/{id}")
        await client.begin()


async def test_failure_to_open_a_session_is_explained(client: ApiClient) -> None:
    for wanted, status, message in (
        ({"tools": ["sub"]}, 409, "no tool named 'sub'"),
        ({"feedback": "nobody"}, 409, "no interaction named 'nobody'"),
        ({"tool": ["add"]}, 422, "Extra inputs are not permitted"),
        ({"ttl_s": -1}, 422, "greater than 0"),
        ({"ttl_s": "60"}, 422, "valid number"),
        ({"feedback": {"ground_truth": 1}}, 422, "valid string"),
    ):
        answer = await client("POST", "/v1/sessions", wanted)
        assert answer.status_code == status and message in answer.json()["error"]["message"]
