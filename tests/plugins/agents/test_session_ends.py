"""Requests that are under way when their session ends, several at once, and chats of another session."""

from __future__ import annotations

import anyio
import pytest

from mtrl_plugins.agents.requests import PolicyProblem, PolicyRequest
from mtrl_plugins.agents.responses_dialect import ResponsesEvents
from mtrl_plugins.agents.turn_tree import message_key
from tests.plugins.agents.agent_harness import open_agents
from tests.plugins.agents.chats import ADD, CALL, USER, tool_reply
from tests.waiting import wait_until
from trainer.rollout.admission import Admission
from trainer.rollout.settings import ConcurrencySettings

pytestmark = pytest.mark.anyio


async def test_request_under_way_ends_with_its_session() -> None:
    async with open_agents(["It is 7."]) as harness, harness.session() as agent:
        harness.engine.hold()
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await agent.post("/chat/completions", {"messages": [USER]})).status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await wait_until(lambda: harness.engine.in_flight == 1)
            await agent.session.end_requests()
            assert harness.engine.in_flight == 0
        assert statuses == [410] and agent.session.tree.turns == []


async def test_rollout_is_busy_until_its_last_generation_ends() -> None:
    admission = Admission(ConcurrencySettings(inflight_rollouts=1, running_requests=4), waiting=1, patience_s=0.01)
    slot = await admission.acquire()
    async with slot:
        async with slot:
            pass
        assert admission._idle_deadlines == {}
    assert len(admission._idle_deadlines) == 1
    async with slot:
        slot.release()
    assert admission._idle_deadlines == {}


async def test_chat_with_calls_of_another_session_is_refused() -> None:
    async with open_agents([CALL, "It is 7."]) as harness, harness.session() as agent:
        message = await agent.chat([USER], tools=[ADD])
        id = message["tool_calls"][0]["id"]
        message["tool_calls"][0]["id"] = f"{id[:-6]}{'0' * 6}"
        body = {"messages": [USER, message, tool_reply(message)], "tools": [ADD]}
        response = await agent.post("/chat/completions", body)
        assert response.status_code == 400 and "another session" in response.json()["error"]["message"]


def test_numbers_that_javascript_wrote_anew_mean_the_same() -> None:
    def key(arguments: str) -> bytes:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return message_key({"role": "assistant", "content": "", "tool_calls": [call]})

    assert key('{"a": 3.0, "b": 12345678901234567891}') == key('{"a":3,"b":12345678901234567000}')
    assert key('{"a": 3.5}') != key('{"a": 3}')
    assert key('{"a": 1e999}') == key('{"a": 1e999}')


def test_response_that_fails_before_its_first_token_is_told_in_order() -> None:
    request = PolicyRequest((), options={"model": "policy", "free": frozenset(), "echo": {}})
    events = ResponsesEvents(request).fail(PolicyProblem("unavailable", "gone")).decode()
    names = [line[7:] for line in events.splitlines() if line.startswith("event: ")]
    assert names == ["response.created", "response.in_progress", "response.failed"]
