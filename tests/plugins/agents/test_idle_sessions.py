"""Sessions whose programs died: they are ended after a while; whatever is under way is not idle."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import httpx2
import pytest

from mtrl_plugins.agents import agent_session
from tests.plugins.agents.agent_harness import open_agents
from tests.plugins.agents.chats import USER
from tests.waiting import PATIENCE_S, wait_until
from trainer.rollout.rollout import StopReason

pytestmark = pytest.mark.anyio


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
