"""An agent for trainings: a loop over Chat Completions that uses the gateway's tools, and rewrites what it sends."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from gateway.types import ToolCall
from mtrl_plugins.agents.agent_runner import AgentHandle
from trainer.rollout.task import Task

MOST_TURNS = 3


async def run(base_url: str, task: Task, session: AgentHandle, opening: str = "") -> float:
    """Plays a task with a side call at its start; its reward is the share of digits in what the policy wrote."""
    messages: list[Any] = [dict(message) for message in task.messages]
    messages[-1]["content"] += opening
    texts = [(await _ask(base_url, session, messages))["content"] or ""]
    for _ in range(MOST_TURNS):
        if (message := await _ask(base_url, session, messages)) is None:
            break
        texts.append(message["content"] or "")
        calls = message.get("tool_calls") or ()
        for call in calls:
            call["function"]["arguments"] = _rewrite(call["function"]["arguments"])
        messages.append(message)
        if not calls:
            break
        for call in calls:
            function = call["function"]
            result = await session.tools.call(ToolCall(call["id"], function["name"], function["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})
    text = "".join(texts)
    return sum(letter in "aeiou0123456789" for letter in text) / max(1, len(text))


async def _ask(base_url: str, session: AgentHandle, messages: list[Any]) -> Any:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=60) as client:
        response = await client.post("/chat/completions", json={"messages": messages, "tools": TOOLS})
        if response.is_client_error:  # A limit of the rollout.
            return None
        response.raise_for_status()
        return response.json()["choices"][0]["message"]


def _rewrite(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), indent=1)
    except ValueError:
        return arguments


def _tool(name: str, argument: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("look_up", "name", "What is known of a person or a city."),
    _tool("calculate", "expression", "Works out a sum."),
]
