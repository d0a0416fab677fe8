"""How sessions end, also those whose programs died; requests that are under way then, and chats of another session."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import httpx2
import pytest

from mtrl_plugins.agents import agent_session
from mtrl_plugins.agents.requests import PolicyProblem, PolicyRequest
from mtrl_plugins.agents.responses_dialect import ResponsesEvents
from mtrl_plugins.agents.turn_tree import message_key
from tests.plugins.agents.agent_harness import ADD, CALL, USER, open_agents, tool_reply
from tests.waiting import PATIENCE_S, wait_until
from trainer.rollout.admission import Admission
from trainer.rollout.rollout import StopReason
from trainer.rollout.settings import ConcurrencySettings


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


@dataclass
class FakeTime:
    """A clock that goes on when a test says so."""

    now_s: float = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(agent_session, "time", fake)
    return fake


async def test_session_is_not_idle_while_the_policy_writes(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    remaining_s = agent_session.SessionUse.remaining_s

    def look(use: agent_session.SessionUse, limit_s: float) -> float:
        looks.append(remaining_s(use, limit_s))
        return looks[-1]

    monkeypatch.setattr(agent_session.SessionUse, "remaining_s", look)
    async with open_agents(["It is 7."], external=True, idle_s=0.05) as harness:
        url, run = harness.host.endpoint.url, {"Authorization": f"Bearer {harness.host.run_key}"}
        sessions, held = harness.host.endpoint.sessions, harness.engine.hold()

        async def play() -> None:
            async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
                about = (await client.post(f"{url}/sessions", json={}, headers=run)).json()
                key = {"Authorization": f"Bearer {about['api_key']}"}
                body = {"messages": [USER]}
                answer = await client.post(f"{about['base_url']}/chat/completions", json=body, headers=key)
                assert answer.status_code == 200 and about["id"] in sessions
            clock.now_s += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play)
            tasks.start_soon(harness.run)
            await wait_until(lambda: harness.engine.in_flight == 1)
            clock.now_s += 1000
            (session,) = sessions.values()
            looks.clear()
            await wait_until(lambda: len(looks) > 3)
            assert session.use.idle_s == 0 and session.id in sessions
            held.set()
        assert session.use.abandoned and not sessions


async def test_rollout_whose_external_program_died_is_lost_with_the_reason() -> None:
    async with open_agents(["It is 7."], external=True, idle_s=0.1) as harness:
        url, run = harness.host.endpoint.url, {"Authorization": f"Bearer {harness.host.run_key}"}

        async def open_and_die() -> None:
            async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
                await client.post(f"{url}/sessions", json={}, headers=run)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_and_die)
            rollout = await harness.run()
    assert rollout.stop is StopReason.AGENT_FAILED and "no request for 0.1 s" in rollout.reason
