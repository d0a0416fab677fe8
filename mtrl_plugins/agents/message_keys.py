"""Compares chat messages by meaning: agents rewrite what they send back, such as the JSON of a call's arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from gateway.types import Audio, Image, Video
from mtrl_plugins.agents.message_cache import ReadMessage
from trainer.ledger import Message

ROLES = {"developer": "system"}
"""Roles that mean another one."""
TOOL_CALLS = "tool_calls"


class Change(StrEnum):
    """How an agent changed what the policy had written before it sent it back."""

    WHITESPACE = "whitespace"
    ARGUMENTS = "arguments"
    """The JSON of a call's arguments was written anew."""
    REASONING = "reasoning"
    """The reasoning was dropped, or is another."""
    CALL_IDS = "call_ids"
    HISTORY = "history"
    """A message was edited, added or removed, so that the prompt is a new one."""
    TOOLS = "tools"
    """The same chat came with other tools, so that the prompt is a new one."""


def message_key(message: Message) -> bytes:
    """A digest of a message's meaning: ids of calls, reasoning and outer white space do not count."""
    if not isinstance(message, ReadMessage):
        return _make_key(message)
    if not hasattr(message, "key"):
        message.key = _make_key(message)
    return message.key


def _make_key(message: Message) -> bytes:
    calls = [
        (call["function"]["name"], _canonical_json(call["function"].get("arguments")))
        for call in message.get(TOOL_CALLS) or ()
    ]
    role = message["role"]
    meaning = (ROLES.get(role, role), _content_key(message.get("content")), calls)
    return blake2b(repr(meaning).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """A digest of the offered tools, in their order."""
    return blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).digest()


def extend_key(key: bytes, more: bytes) -> bytes:
    """The digest of a history that goes on by one message."""
    return blake2b(key + more, digest_size=16).digest()


def find_changes(written: Message, sent_back: Message) -> list[Change]:
    """The differences between the policy's turn, as the agent was given it, and what the agent made of it."""
    changes = []
    if (written.get("content") or "") != _plain(sent_back.get("content")):
        changes.append(Change.WHITESPACE)
    pairs = list(zip(written.get(TOOL_CALLS) or (), sent_back.get(TOOL_CALLS) or (), strict=False))
    if any(one["function"]["arguments"] != other["function"].get("arguments") for one, other in pairs):
        changes.append(Change.ARGUMENTS)
    if any(one["id"] != other.get("id") for one, other in pairs):
        changes.append(Change.CALL_IDS)
    if (written.get("reasoning_content") or "") != (sent_back.get("reasoning_content") or ""):
        changes.append(Change.REASONING)
    return changes


def _canonical_json(arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        value = json.loads(text or "{}", parse_int=_read_number, parse_float=_read_number)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


def _read_number(text: str) -> float | int:
    """A number as JavaScript reads it, in which many agents are written: `3.0` is 3, and large integers are rounded."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _content_key(content: Any) -> Any:
    """A text, or a list of texts and digests of media."""
    if not isinstance(content, list):
        return (content or "").strip()
    parts = [_part_key(part) for part in content]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts).strip()
    return [part for part in parts if part]


def _part_key(part: Mapping[str, Any]) -> Any:
    if part.get("type") == "text":
        return str(part["text"]).strip()
    medium = part.get(str(part.get("type")))
    if isinstance(medium, Image | Audio | Video):
        return blake2b(medium.data, digest_size=16).digest()
    return json.dumps(part, sort_keys=True, default=str)


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content or ""
