"""The rollout's tools as an MCP server: the same session, its rewards, and nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from gateway.client import RemoteGateway
from gateway.gateway import Gateway
from gateway.types import Text, ToolResult, ToolSpec
from mtrl_plugins.agents.agent_runner import AgentHandle
from tests.live_server import live_server_async
from tests.plugins.agents.agent_harness import ADD, CALL, TASK, TEMPLATE, USER, Requests, open_agents, tool_reply
from tests.trainer.policy_scripts import make_gateway
from tests.waiting import PATIENCE_S
from trainer.rollout.loop import find_offered
from trainer.rollout.rollout import StopReason
from trainer.rollout.task import Task

FUNCTION = f"{__name__}:use_tools"


async def add(a: int, b: int) -> ToolResult:
    """Adds."""
    return ToolResult((Text(str(a + b)),), reward=0.5)


@asynccontextmanager
async def connect(url: str, key: str) -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


async def use_tools(base_url: str, task: Task, session: AgentHandle) -> None:
    """An agent that calls a tool over MCP, and tells the policy what came of it."""
    async with connect(session.description["mcp_url"], session.api_key) as client:
        (tool,) = (await client.list_tools()).tools
        assert (tool.name, set(tool.input_schema["properties"])) == ("add", {"a", "b"})
        result = await client.call_tool("add", {"a": 3, "b": 4})
        bad = await client.call_tool("add", {"a": "three", "b": 4})
        assert bad.is_error
        with pytest.raises(MCPError, match="Unknown tool"):
            await client.call_tool("feedback", {})
    await check_refused(session.description["mcp_url"], "another")
    async with httpx2.AsyncClient(
        base_url=base_url, headers={"x-api-key": session.api_key}, timeout=PATIENCE_S
    ) as http:
        text = result.content[0].text  # type: ignore[union-attr]
        answer = await http.post("/chat/completions", json={"messages": [{"role": "user", "content": text}]})
        assert answer.status_code == 200


async def check_refused(url: str, key: str) -> None:
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        answer = await http.post(url, json=call, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 404 and "no such session" in answer.text


async def test_agent_calls_the_tools_of_a_remote_gateway_over_mcp_and_their_rewards_count() -> None:
    async with (
        live_server_async(lambda: make_gateway(add)) as server,
        open_agents(["It is 7."], gateway=RemoteGateway(server.url), function=FUNCTION) as harness,
    ):
        rollout = await harness.run(TASK)
    assert (rollout.stop, rollout.reason) == (StopReason.DONE, "")
    assert rollout.ledger.messages[0]["content"] == "7" and rollout.rewards["call"] == 0.5


async def test_session_without_tools_says_so() -> None:
    async with open_agents([""]) as harness, harness.session() as agent:
        assert harness.host.endpoint.describe(agent.session)["mcp_url"] == ""
        url = f"{harness.host.endpoint.url}/sessions/{agent.session.id}/mcp"
        answer = await agent.client.post(url, json={}, headers={"x-api-key": agent.session.api_key})
        assert answer.status_code == 404 and "has no tools" in answer.text


async def test_each_session_sees_its_own_tools_only() -> None:
    async with open_agents([""], add) as harness, harness.session() as first, harness.session() as second:
        gateway: Gateway = harness.runner.gateway  # type: ignore[assignment]
        async with gateway.open() as tools, gateway.open() as others:
            first.session.tools, second.session.tools = tools, others
            url = f"{harness.host.endpoint.url}/sessions/{first.session.id}/mcp"
            async with connect(url, first.session.api_key) as client:
                await client.call_tool("add", {"a": 1, "b": 1})
            assert (len(tools.rewards), len(others.rewards)) == (1, 0)
            await check_refused(url, second.session.api_key)


TEXT = "Adds without error."
SYSTEM = {"role": "system", "content": "You are mine."}


def with_instructions(agent: Requests) -> Requests:
    """The session with a gateway's tool whose server says something about itself."""
    agent.session.tools = SimpleNamespace(specs=[ToolSpec("add", instructions=TEXT), ToolSpec("sub")])  # type: ignore[assignment]
    return agent


def sent(harness: Any) -> list[str]:
    return [TEMPLATE.tokenizer.decode(request.ids) for request in harness.engine.requests]


@pytest.mark.parametrize("chat", [[SYSTEM, USER], [USER]])
async def test_instructions_follow_the_agents_system_prompt_in_every_request(chat: list[Any]) -> None:
    async with open_agents([CALL, "It is 7."]) as harness, harness.session() as plain:
        agent = with_instructions(plain)
        message = await agent.chat(chat, tools=[ADD])
        await agent.chat([*chat, message, tool_reply(message)], tools=[ADD])
        first, second = sent(harness)
        begin = "You are mine.\n\n" if SYSTEM in chat else ""
        assert f"{begin}{TEXT}" in first and first.count(TEXT) == second.count(TEXT) == 1
        before, after = harness.engine.requests
        turn = agent.session.tree.turns[0].entry.ids
        assert after.ids[: len(before.ids) + len(turn)] == before.ids + turn
        assert len(agent.session.tree.ledgers()) == 1 and agent.session.tree.changed == {}


async def test_chats_without_the_servers_tools_get_nothing_and_an_agents_own_instructions_are_not_repeated() -> None:
    async with open_agents(["A title.", "It is 7.", "Seven."]) as harness, harness.session() as plain:
        agent = with_instructions(plain)
        await agent.chat([SYSTEM, USER])
        await agent.chat([SYSTEM, USER], tools=[replace_name(ADD, "read_file")])
        await agent.chat([{"role": "system", "content": f"You are mine. Of a tool: {TEXT}"}, USER], tools=[ADD])
        assert [prompt.count(TEXT) for prompt in sent(harness)] == [0, 0, 1]


async def test_response_that_names_the_one_before_has_them_once() -> None:
    async with open_agents(["It is 7.", "It is 8."]) as harness, harness.session() as plain:
        agent = with_instructions(plain)
        tools = [{"type": "function", **ADD["function"]}]
        body = {"input": "What is 3 + 4?", "instructions": "Be brief.", "tools": tools}
        first = (await agent.post("/responses", body)).json()
        body |= {"input": "And one more?", "previous_response_id": first["id"]}
        assert (await agent.post("/responses", body)).status_code == 200
        before, after = harness.engine.requests
        assert [prompt.count(TEXT) for prompt in sent(harness)] == [1, 1]
        turn = agent.session.tree.turns[0].entry.ids
        assert after.ids[: len(before.ids) + len(turn)] == before.ids + turn


def replace_name(tool: Any, name: str) -> Any:
    return {**tool, "function": {**tool["function"], "name": name}}


def test_tools_are_found_under_the_names_that_mcp_clients_give_them() -> None:
    spec = ToolSpec("add")
    for name in ("add", "mcp__mtrl__add", "mtrl_add", "mtrl.add"):
        assert find_offered([spec, replace(spec, name="sub")], [replace_name(ADD, name)]) == [spec]
    assert find_offered([spec], [replace_name(ADD, "readd")]) == []
