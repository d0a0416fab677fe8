"""What MCP servers say about themselves follows the system prompt of an agent's chats, and every id stays."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.types import ToolSpec
from tests.plugins.agents.agent_harness import ADD, CALL, TEMPLATE, USER, Requests, open_agents, tool_reply
from trainer.rollout.loop import find_offered

pytestmark = pytest.mark.anyio

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
