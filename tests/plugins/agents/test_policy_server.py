"""The policy served alone: requests without a session, sessions whose rollouts are kept, keys, bounds and the end."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from gateway.errors import ConfigError
from mtrl_plugins.agents.policy_server import PolicyServer, SharedSession
from mtrl_plugins.agents.settings import AgentSettings
from tests.plugins.agents.agent_harness import TEMPLATE, Policy, open_agents, script
from tests.plugins.agents.chats import ADD, CALL, USER, tool_reply
from tests.trainer.policy_scripts import make_gateway
from tests.waiting import PATIENCE_S, wait_until
from trainer.engine.base import EngineError
from trainer.engine.scripted import ScriptedEngine
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout, StopReason

pytestmark = pytest.mark.anyio


@dataclass
class Served:
    """A server, its engine and what it kept."""

    server: PolicyServer
    engine: ScriptedEngine
    client: httpx2.AsyncClient
    kept: list[Rollout] = field(default_factory=list)

    @property
    def shared(self) -> SharedSession:
        assert isinstance(self.server.endpoint.shared, SharedSession)
        return self.server.endpoint.shared

    async def post(self, path: str, body: Mapping[str, Any], key: str = "") -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.client.post(path, json=dict(body), headers=headers)

    async def chat(self, messages: list[Any], path: str = "/v1/chat/completions", key: str = "", **body: Any) -> Any:
        response = await self.post(path, {"messages": messages, **body}, key)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]


@asynccontextmanager
async def serve(policy: Policy | list[str], token: str = "", **settings: Any) -> AsyncIterator[Served]:
    engine = ScriptedEngine(script(policy))
    kept: list[Rollout] = []

    async def keep(rollout: Rollout) -> None:
        kept.append(rollout)

    agent = AgentSettings(external=True, sampling="request", **settings)
    with anyio.fail_after(2 * PATIENCE_S):
        async with make_gateway() as gateway:
            server = PolicyServer(agent, RolloutRunner(engine, TEMPLATE, gateway), token, keep)
            async with server, httpx2.AsyncClient(base_url=server.endpoint.url, timeout=PATIENCE_S) as client:
                yield Served(server, engine, client, kept)


async def test_each_protocol_works_without_a_session_and_with_any_key() -> None:
    async with serve(lambda prompt: "It is 7.") as served:
        assert (await served.chat([USER], key="sk-whatever"))["content"] == "It is 7."
        messages = await served.post("/v1/messages", {"messages": [USER], "max_tokens": 20})
        assert messages.json()["content"][0]["text"] == "It is 7."
        responses = await served.post("/v1/responses", {"input": "What is 3 + 4?"})
        assert responses.json()["output"][0]["content"][0]["text"] == "It is 7."
        models = await served.client.get("/v1/models")
        assert models.json()["data"][0]["context_length"] == 4096
    assert served.kept == []


async def test_chats_without_a_session_go_on_from_the_ids_that_were_sampled() -> None:
    async with serve([CALL, "Another.", "It is 7."]) as served:
        message = await served.chat([USER], tools=[ADD])
        await served.chat([{"role": "user", "content": "Else?"}])
        await served.chat([USER, message, tool_reply(message)], tools=[ADD])
        first, _, third = served.engine.requests
        turn = served.shared.tree.turns[0].entry.ids
        assert third.ids[: len(first.ids) + len(turn)] == first.ids + turn


async def test_old_turns_are_forgotten_and_their_chats_still_answered() -> None:
    async with serve(lambda prompt: "yes") as served:
        served.shared.kept_turns = 3
        old = await served.chat([USER])
        for number in range(20):
            await served.chat([{"role": "user", "content": f"Question {number}"}])
        assert len(served.shared.tree.turns) < 6 and len(served.shared._chats) < 6
        assert (await served.chat([USER, old, USER]))["content"] == "yes"


async def test_temperature_of_the_request_counts() -> None:
    async with serve(lambda prompt: "yes") as served:
        await served.chat([USER], temperature=0.25, top_p=0.5)
        (request,) = served.engine.requests
        assert (request.sampling.temperature, request.sampling.top_p) == (0.25, 0.5)


async def test_session_is_kept_with_its_rewards_when_it_ends() -> None:
    async with serve(lambda prompt: "It is 7.") as served:
        about = (await served.post("/sessions", {"task": {"id": "mine", "prompt": "hi"}})).json()
        path = f"/sessions/{about['id']}"
        assert about["task"]["prompt"] == "hi" and about["base_url"].endswith(f"{path}/v1")
        await served.chat([USER], f"{path}/v1/chat/completions", about["api_key"])
        await served.post(f"{path}/reward", {"reward": 0.5}, about["api_key"])
        await served.post(f"{path}/end", {}, about["api_key"])
        await wait_until(lambda: len(served.kept) == 1)
        (rollout,) = served.kept
        assert (rollout.task, rollout.stop, rollout.rewards) == ("mine", StopReason.DONE, {"agent": 0.5})
        assert served.shared.tree.turns == []
        gone = await served.post(f"{path}/v1/chat/completions", {"messages": [USER]}, about["api_key"])
        assert gone.status_code == 404 and "has ended" in gone.json()["error"]["message"]


async def test_sessions_that_are_open_at_the_end_are_kept_as_cancelled_and_empty_ones_are_not() -> None:
    async with serve(lambda prompt: "It is 7.") as served:
        about = [(await served.post("/sessions", {})).json() for _ in range(2)]
        await served.chat([USER], f"/sessions/{about[0]['id']}/v1/chat/completions", about[0]["api_key"])
    (rollout,) = served.kept
    assert rollout.stop is StopReason.CANCELLED and "stopped" in rollout.reason and len(rollout.turns) == 1


async def test_session_needs_its_own_key() -> None:
    async with serve(lambda prompt: "yes", token="sesame") as served:
        one, other = [(await served.post("/sessions", {}, "sesame")).json() for _ in range(2)]
        for key in ("none", "sesame", other["api_key"], one["api_key"][:-1], one["api_key"] + "x", "ü" * 8):
            headers = {b"authorization": f"Bearer {key}".encode()}
            for path in ("v1/chat/completions", "reward", "end"):
                url = f"/sessions/{one['id']}/{path}"
                refused = await served.client.post(url, json={"messages": [USER], "reward": 1}, headers=headers)
                assert refused.status_code == 404
        assert (await served.chat([USER], f"/sessions/{one['id']}/v1/chat/completions", one["api_key"])) is not None


async def test_token_is_needed_where_there_is_one_in_either_protocols_header() -> None:
    async with serve(lambda prompt: "yes", token="sesame") as served:
        refused = await served.post("/v1/chat/completions", {"messages": [USER]}, "wrong")
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        anthropic = await served.client.post("/v1/messages", json={"messages": [USER]}, headers={"x-api-key": "wrong"})
        assert anthropic.status_code == 401 and anthropic.json()["error"]["type"] == "authentication_error"
        assert (await served.post("/sessions", {}, "wrong")).status_code == 401
        assert (await served.client.get("/v1/models")).status_code == 401
        allowed = await served.client.post("/v1/messages", json={"messages": [USER]}, headers={"x-api-key": "sesame"})
        assert allowed.status_code == 200


async def test_page_of_another_name_is_refused_without_a_token_and_served_with_one() -> None:
    headers = {"host": "evil.example"}
    async with serve(lambda prompt: "yes") as served:
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 403
    async with serve(lambda prompt: "yes", token="sesame") as served:
        headers["authorization"] = "Bearer sesame"
        assert (await served.client.get("/v1/models", headers=headers)).status_code == 200


async def test_address_other_than_loopback_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines") as caught:
        async with serve(lambda prompt: "yes", host="0.0.0.0"):
            raise AssertionError
    assert "--token-file" in str(caught.value)


async def test_failed_engine_is_asked_again() -> None:
    async with serve(["fine"]) as served:
        answers, served.engine._script = served.engine._script, lambda *_: EngineError("it is gone")
        failed = await served.post("/v1/chat/completions", {"messages": [USER]})
        assert failed.status_code == 503 and failed.json()["error"]["type"] == "server_error"
        served.engine._script = answers
        assert (await served.chat([USER]))["content"] == "fine"


@pytest.mark.parametrize(
    ("body", "param"),
    [({"task": [1]}, "task"), ({"task": {"id": 3}}, "task.id"), ({"task": {"id": "x" * 300}}, "task.id")],
)
async def test_bad_task_is_refused(body: dict[str, Any], param: str) -> None:
    async with serve([]) as served:
        response = await served.post("/sessions", body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param


async def test_rewards_are_bounded() -> None:
    async with serve([]) as served:
        about = (await served.post("/sessions", {})).json()
        for number in range(100):
            await served.post(f"/sessions/{about['id']}/reward", {"reward": 1, "name": str(number)}, about["api_key"])
        one_more = {"reward": 1, "name": "one more"}
        refused = await served.post(f"/sessions/{about['id']}/reward", one_more, about["api_key"])
        assert refused.status_code == 400
        long = await served.post(f"/sessions/{about['id']}/reward", {"reward": 1, "name": "n" * 101}, about["api_key"])
        assert long.status_code == 400


async def test_address_and_key_for_external_programs_are_in_a_file_of_this_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "agents.json"
    file.write_text("an older one")
    async with open_agents([], external=True, address_file=file) as harness:
        about = json.loads(file.read_text())
        assert about == {"url": harness.host.endpoint.url, "api_key": harness.host.run_key}
        assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == []


async def test_program_that_waits_for_a_session_is_told_that_the_run_has_ended() -> None:
    statuses: list[int] = []

    async def ask(url: str, key: str) -> None:
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            response = await client.post(f"{url}/sessions", json={}, headers={"Authorization": f"Bearer {key}"})
            statuses.append(response.status_code)

    async with anyio.create_task_group() as tasks, open_agents([], external=True) as harness:
        tasks.start_soon(ask, harness.host.endpoint.url, harness.host.run_key)
        await wait_until(lambda: harness.host.programs > 0)
    assert statuses == [410]
