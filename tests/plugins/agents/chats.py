"""Chats that the tests of the endpoint share: a question, a tool, a call and its answer."""

from __future__ import annotations

from typing import Any

from tests.plugins.agents.agent_harness import call_text

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
USER = {"role": "user", "content": "What is 3 + 4?"}
CALL = call_text("add", '{"a":3,   "b": 4}')


def tool_reply(message: dict[str, Any], text: str = "7", index: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][index]["id"], "content": text}
