"""Episodes of an OpenEnv server, over a real WebSocket to a stand-in: sessions, faults, deadlines, and what is left."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest

from gateway.errors import ConfigError
from gateway.types import Image, Text
from tests.plugins.environments.environment_runs import make_settings, observations, open_run, rewards
from tests.plugins.environments.openenv_server import ACTION, open_server
from tests.toolset_conformance.sample_tools import PNG
from tests.trainer.policy_scripts import render_calls
from tests.waiting import wait_until
from trainer.rollout.rollout import Rollout, StopReason
from trainer.setup import make_gateway


def guess(number: Any, tool: str = "step") -> str:
    return render_calls((tool, {"number": number}))


def secret(seed: int) -> int:
    return Random(seed).randint(1, 9)


async def test_fields_of_an_action_are_the_arguments_of_the_tool() -> None:
    async with open_server() as server, open_run(f"openenv:{server.url}", args={"level": 3}) as runs:
        spec = runs.gateway.specs[0]
        rollout = await runs.run(guess(99), guess("many"), guess(secret(0)))
        await wait_until(lambda: server.open == 0)
    assert spec.parameters["properties"] == {"number": {"type": "integer"}} and spec.parameters["required"] == [
        "number"
    ]
    opening, refused, unfit, last = observations(rollout)
    assert opening.endswith("Guess. 3")
    assert refused == "This is no action: Invalid message; number: should be at most 9"
    assert "is not of type" in unfit
    assert last == "right\nreward: 1\nThe episode is over: it has ended."
    assert rollout.infos["environment"]["return"] == 1.0 and rewards(rollout) == [1.0]


async def test_rollouts_have_their_own_episodes_at_once_and_wait_while_the_server_is_full() -> None:
    async def play(row: int) -> None:
        rollouts.append(await runs.run(guess(secret(row)), row=row))

    rollouts: list[Rollout] = []
    async with open_server(capacity=3) as server, open_run(f"openenv:{server.url}") as runs:
        async with anyio.create_task_group() as tasks:
            for row in range(16):
                tasks.start_soon(play, row)
        assert 1 < server.most <= 3
    assert [rollout.stop for rollout in rollouts] == [StopReason.TOOL_DONE] * 16
    assert [rollout.infos["environment"]["return"] for rollout in rollouts] == [1.0] * 16


async def test_server_that_stays_full_is_named_with_what_to_raise() -> None:
    async with open_server(capacity=0) as server, open_run(f"openenv:{server.url}", timeout_s=0.3) as runs:
        rollout = await runs.run(guess(1))
    assert rollout.stop is StopReason.TOOL_FAILED
    assert "is full: at capacity" in rollout.reason and "max_concurrent_envs" in rollout.reason


async def test_connection_that_is_lost_before_the_first_turn_is_made_once_more() -> None:
    async with open_server("first reset lost") as server, open_run(f"openenv:{server.url}") as runs:
        rollout = await runs.run(guess(secret(0)))
        assert server.resets == 2
    assert rollout.stop is StopReason.TOOL_DONE


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("silence", "did not answer 'step' within 1 s"),
        ("close", "the connection was closed: received 1000 (OK) bye"),
        ("bytes", "something else than JSON"),
        ("huge", "message too big"),
        ("raise", "it broke"),
    ],
)
async def test_what_breaks_in_an_episode_costs_the_rollout_and_leaves_no_session(trouble: str, reason: str) -> None:
    async with open_server(trouble) as server, open_run(f"openenv:{server.url}", timeout_s=1) as runs:
        rollout = await runs.run(guess(1))
        group = await runs.score(rollout)
        await wait_until(lambda: server.open == 0)
    assert rollout.stop is StopReason.TOOL_FAILED and reason in rollout.reason
    assert not group.scored


async def test_tools_of_an_environment_that_has_some_are_called_by_their_names() -> None:
    action = {"properties": {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}}}
    async with open_server(action=action) as server, open_run(f"openenv:{server.url}") as runs:
        names = [spec.name for spec in runs.gateway.specs if spec.audience == "policy"]
        rollout = await runs.run(*(guess(number, "guess") for number in (0, -1, secret(0))))
        late = await runs.run(guess(-2, "guess"))
    assert names == ["guess"] and rewards(rollout) == [1.0]
    refused, failed, _ = observations(rollout)[1:]
    assert (refused, failed) == ("This is no action: it cannot be", "Error: it cannot be")
    assert rollout.ledger.entries[-1].parts[:2] == (Text("right"), Image(PNG))
    assert late.stop is StopReason.TOOL_FAILED and "it cannot be" in late.reason


async def test_turn_may_be_the_action() -> None:
    async with open_server() as server, open_run(f"openenv:{server.url}", actions="text") as runs:
        as_json = await runs.run("Hm.\n" + f'{{"number": {secret(0)}}}')
        unread = await runs.run("five", f'{{"number": {secret(0)}}}', index=1)
    assert rewards(as_json) == [1.0]
    assert observations(unread)[1] == "This is no action: write a JSON object, alone in the last line."
    text_only = {**ACTION, "properties": {"number": {"type": "string"}}}
    async with open_server(action=text_only) as server, open_run(f"openenv:{server.url}", actions="text") as runs:
        rollout = await runs.run("five", "six", *["seven"] * 40)
    assert "should be at most 9" in observations(rollout)[1]


async def test_token_is_sent_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV_TOKEN", "secret-token")
    async with open_server() as server, open_run(f"openenv:{server.url}", token_variable="ENV_TOKEN") as runs:
        await runs.run(guess(secret(0)))
        assert all("uthorization: Bearer secret-token" in head for head in server.headers)
        monkeypatch.delenv("ENV_TOKEN")
        with pytest.raises(ConfigError, match="ENV_TOKEN is not set"):
            async with make_gateway(make_settings(f"openenv:{server.url}", token_variable="ENV_TOKEN")):
                pass


async def test_address_without_a_server_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"does not answer as an OpenEnv server(.|\n)*start it"):
        async with make_gateway(make_settings("openenv:http://127.0.0.1:9")):
            pass
    async with open_server("no websocket") as server, open_run(f"openenv:{server.url}", timeout_s=0.2) as runs:
        rollout = await runs.run(guess(1))
    assert "cannot be reached: InvalidStatus: server rejected WebSocket connection: HTTP 404" in rollout.reason
