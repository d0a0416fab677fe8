"""The agent of the job `agent`: a plain loop over Chat Completions with two tools of its own, as one finds it anywhere.

It knows the policy only by its base URL and its key, and it imports nothing of mtrl.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Mapping
from typing import Any

import httpx2

MOST_TURNS = 6
TIMEOUT_S = 120.0
SUM = re.compile(r"\s*(\d{1,9})\s*([+-])\s*(\d{1,9})\s*", re.ASCII)
_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Made once: a client makes one of its own otherwise, which takes longer than its requests."""


def _tool(name: str, argument: str, description: str) -> Mapping[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool("look_up", "name", "What is known of a person or a city."),
    _tool("calculate", "expression", "Adds or subtracts two numbers."),
)


async def run(base_url: str, task: Any, session: Any) -> None:
    """Asks the policy until it answers without a call. The run's reward function scores the answer."""
    facts = task.columns.get("facts") or {}
    chat: list[Mapping[str, Any]] = [{"role": "user", "content": task.messages[-1]["content"]}]
    headers = {"Authorization": f"Bearer {session.api_key}"}
    async with httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT_S, verify=_TLS) as client:
        for _ in range(MOST_TURNS):
            body = {"model": session.model, "messages": chat, "tools": TOOLS}
            response = await client.post("/chat/completions", json=body)
            if response.is_client_error:  # A limit of the rollout: what was written so far counts.
                return
            response.raise_for_status()
            message = response.json()["choices"][0]["message"]
            chat.append(message)
            calls = message.get("tool_calls") or ()
            if not calls:
                return
            chat += [
                {"role": "tool", "tool_call_id": call["id"], "content": answer_call(call["function"], facts)}
                for call in calls
            ]


def answer_call(function: Mapping[str, str], facts: Mapping[str, str]) -> str:
    """What a tool answers; a call that makes no sense is told what was wrong with it."""
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return "the arguments are no JSON"
    match function["name"], arguments:
        case "look_up", {"name": str(name)}:
            return str(facts.get(name, "unknown"))
        case "calculate", {"expression": str(expression)} if found := SUM.fullmatch(expression):
            first, sign, second = found.groups()
            return str(int(first) + int(second) if sign == "+" else int(first) - int(second))
    return "there is no such tool, or its arguments are others"
