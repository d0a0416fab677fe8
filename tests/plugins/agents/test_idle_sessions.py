"""Sessions whose programs died: they are ended after a while, counted and freed; whatever is under way is not idle."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import anyio
import httpx2
import pytest

from mtrl_plugins.agents import agent_session
from tests.plugins.agents.agent_harness import open_agents
from tests.plugins.agents.chats import USER
from tests.plugins.agents.test_policy_server import serve
from tests.waiting import PATIENCE_S, wait_until
from trainer.rollout.rollout import StopReason

pytestmark = pytest.mark.anyio


@dataclass
class FakeTime:
    """A clock that goes on when a test says so."""

    now_s: float = 1000.0
    reads: int = 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now_s

    async def wait_for_reads(self, count: int = 5) -> None:
        """Until idle sessions were looked for so many times."""
        before = self.reads
        await wait_until(lambda: self.reads >= before + count)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(agent_session, "time", fake)
    return fake


async def test_session_whose_program_died_is_ended_told_counted_and_freed(
    clock: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(lambda prompt: "It is 7.", idle_s=0.05) as served:
        about = (await served.post("/sessions", {})).json()
        path = f"/sessions/{about['id']}/v1/chat/completions"
        await served.chat([USER], path, about["api_key"])
        session = weakref.ref(served.server.endpoint.sessions[about["id"]])
        await clock.wait_for_reads()
        assert served.server.abandoned == 0
        clock.now_s += 1
        await wait_until(lambda: len(served.kept) == 1 and not served.server._opened)
        (rollout,) = served.kept
        assert rollout.stop is StopReason.AGENT_FAILED and "no request for 0.05 s" in rollout.reason
        assert len(rollout.turns) == 1 and served.server.abandoned == 1 and "was ended: its program" in caplog.text
        gone = await served.post(path, {"messages": [USER]}, about["api_key"])
        assert gone.status_code == 404 and "has ended" in gone.json()["error"]["message"]
        gc.collect()
        assert session() is None


async def test_session_is_not_idle_while_the_policy_writes(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    remaining_s = agent_session.SessionUse.remaining_s

    def look(use: agent_session.SessionUse, limit_s: float) -> float:
        looks.append(remaining_s(use, limit_s))
        return looks[-1]

    monkeypatch.setattr(agent_session.SessionUse, "remaining_s", look)
    async with serve(lambda prompt: "It is 7.", idle_s=0.05) as served:
        about = (await served.post("/sessions", {})).json()
        held = served.engine.hold()
        statuses: list[int] = []

        async def ask() -> None:
            response = await served.post(
                f"/sessions/{about['id']}/v1/chat/completions", {"messages": [USER]}, about["api_key"]
            )
            statuses.append(response.status_code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await wait_until(lambda: served.engine.in_flight == 1)
            clock.now_s += 1000
            session = served.server.endpoint.sessions[about["id"]]
            looks.clear()
            await wait_until(lambda: len(looks) > 3)
            assert session.use.idle_s == 0 and about["id"] in served.server.endpoint.sessions
            held.set()
        assert statuses == [200] and about["id"] in served.server.endpoint.sessions
        clock.now_s += 1
        await wait_until(lambda: served.server.abandoned == 1)


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
