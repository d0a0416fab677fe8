"""Reads the items of a Responses input as chat messages: what one turn of the policy became is one message again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mtrl_plugins.agents.call_ids import find_turn
from mtrl_plugins.agents.message_content import read_content
from mtrl_plugins.agents.policy_request import refuse, require
from trainer.ledger import Message
from trainer.template.chat_template import build_call

FREE_TEXT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The parameters under which the policy sees a tool that takes free text."""
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ROLES = frozenset({"system", "developer", "user", "assistant"})


def read_items(items: Sequence[Any]) -> list[Message]:
    """The messages of a list of items."""
    reader = _Reader()
    for index, item in enumerate(items):
        reader.add(item, f"input.{index}")
    return [*reader.messages]


def read_free_text(arguments: str) -> str:
    """The free text in a call's arguments; all of them where the policy wrote something else."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


class _Reader:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        """The policy's turn that the latest items belong to."""

    def add(self, item: Any, where: str) -> None:
        require(isinstance(item, Mapping), "must be an object", where)
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._add_reasoning(item)
        elif kind in _CALLS:
            self._add_call(item, _CALLS[kind], where)
        elif kind in _OUTPUTS:
            self._turn = None
            content = read_content(item.get("output"), f"{where}.output")
            self.messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content})
        else:
            refuse(True, f"items of type {kind!r} are not supported", where)

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        require(role in _ROLES, f"must be one of {', '.join(sorted(_ROLES))}", f"{where}.role")
        content = read_content(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._turn = None
            self.messages.append({"role": "system" if role == "developer" else role, "content": content})
            return
        turn = self._open_turn(new="content" in (self._turn or {}) and bool((self._turn or {})["content"]))
        turn["content"] = content

    def _add_reasoning(self, item: Mapping[str, Any]) -> None:
        parts = item.get("content") or item.get("summary") or ()
        text = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        turn = self._open_turn()
        if text:
            turn["reasoning_content"] = "\n".join(filter(None, [turn.get("reasoning_content"), text]))

    def _add_call(self, item: Mapping[str, Any], field: str, where: str) -> None:
        require(isinstance(item.get("name"), str), "needs a name", where)
        text = item.get(field)
        require(isinstance(text, str), "must be text", f"{where}.{field}")
        arguments = str(text) if field == "arguments" else json.dumps({"input": text})
        turn = self._turn or self._reopen_turn(str(item.get("call_id", ""))) or self._open_turn()
        turn.setdefault("tool_calls", []).append(build_call(str(item.get("call_id", "")), item["name"], arguments))

    def _reopen_turn(self, call_id: str) -> dict[str, Any] | None:
        """The turn that a call belongs to by its id, where outputs of earlier calls of it stand between."""
        turn: dict[str, Any] = next((one for one in reversed(self.messages) if one["role"] != "tool"), {})
        ids = [call["id"] for call in turn.get("tool_calls") or ()]
        return turn if ids and find_turn(call_id) is not None and find_turn(ids[0]) == find_turn(call_id) else None

    def _open_turn(self, *, new: bool = False) -> dict[str, Any]:
        if self._turn is None or new:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn
