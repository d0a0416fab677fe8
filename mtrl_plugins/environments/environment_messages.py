"""Converts between an environment's chat and ours: messages it sends, tools it offers, turns that it is given."""

from __future__ import annotations

import binascii
import json
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.types import Image, ToolCall, ToolSpec
from mtrl_plugins.environments.host_process import EnvironmentFailed
from trainer.ledger import Message
from trainer.parse.base import Reply

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
IMAGE_URL = re.compile(r"data:(image/[\w.+-]+);base64,")


def read_messages(value: Any) -> tuple[Message, ...]:
    """The chat that an environment shows its model. Raises EnvironmentFailed if a message cannot be shown."""
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise EnvironmentFailed(f"the environment sent {value!r:.80} instead of messages")
    names: dict[str, str] = {}
    return tuple(_read_message(message, names) for message in value)


def _read_message(message: Mapping[str, Any], names: dict[str, str]) -> Message:
    """One message, without empty keys; an answer of a tool gets the tool's name from the call."""
    read = {key: message[key] for key in KEYS if message.get(key) is not None}
    if read.get("role") not in ROLES:
        raise EnvironmentFailed(f"the environment sent a message of the role {read.get('role')!r:.40}")
    read["content"] = _read_content(message.get("content"))
    for call in read.get("tool_calls", ()):
        names[str(call.get("id"))] = str(call["function"]["name"])
    if read["role"] == "tool" and read.get("tool_call_id") in names:
        read.setdefault("name", names[read["tool_call_id"]])
    return read


def _read_content(content: Any) -> Any:
    """Text, or parts if there are images."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_read_part(part) for part in content] if isinstance(content, list) else [content]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _read_part(part: Any) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else image
    if isinstance(url, str) and (match := IMAGE_URL.match(url)):
        try:
            return {"type": "image", "image": Image(b64decode(url[match.end() :], validate=True), match[1])}
        except binascii.Error as error:
            raise EnvironmentFailed(f"the environment sent an image that is not base64 ({error})") from error
    remedy = "send text, or images as `data:` URLs"
    raise EnvironmentFailed(f"the environment sent a part that cannot be shown: {part!r:.80}\n  remedy: {remedy}")


def read_tools(value: Any, owner: str) -> tuple[ToolSpec, ...]:
    """The tools that an environment offers its model, in OpenAI's form."""
    functions = [tool.get("function") for tool in value or () if isinstance(tool, Mapping)]
    specs = (
        ToolSpec(
            str(function["name"]),
            str(function.get("description") or ""),
            function.get("parameters") or {"type": "object", "properties": {}},
            owner=owner,
        )
        for function in functions
        if isinstance(function, Mapping)
    )
    return tuple(specs)


def write_turn(reply: Reply, text: str, *, inline_reasoning: bool) -> Message:
    """The policy's turn as an environment sees a model's; with a malformed call, it is text as the policy wrote it."""
    if reply.problems:
        return {"role": "assistant", "content": text}
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning and inline_reasoning:
        message["content"] = f"<think>\n{reply.reasoning}\n</think>\n\n{reply.content}"
    elif reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_write_call(call) for call in reply.calls]
    return message


def _write_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def new_messages(known: Sequence[Message], turn: Message, asked: Sequence[Message]) -> tuple[Message, ...] | None:
    """What the environment added to the chat that it knows and the policy's turn; None if it changed them."""
    count = len(known)
    if len(asked) <= count + 1 or tuple(asked[:count]) != tuple(known) or not _is_same_turn(turn, asked[count]):
        return None
    added = tuple(asked[count + 1 :])
    return None if any(message["role"] == "assistant" for message in added) else added


def _is_same_turn(turn: Message, other: Message) -> bool:
    """Whether a message of the environment's chat is the policy's turn, which it may have written anew."""
    return (
        other.get("role") == "assistant"
        and (turn.get("content") or "") == (other.get("content") or "")
        and [*map(_call_key, turn.get("tool_calls") or ())] == [*map(_call_key, other.get("tool_calls") or ())]
    )


def _call_key(call: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError):
        arguments = function.get("arguments")
    return call.get("id"), function.get("name"), arguments


def add_observation(messages: tuple[Message, ...], observation: Any) -> tuple[Message, ...]:
    """The chat with an observation, a text or blocks of content, at the end of its last message."""
    if observation is None:
        return messages
    content = messages[-1].get("content") or ""
    if isinstance(content, str) and isinstance(observation, str):
        return (*messages[:-1], {**messages[-1], "content": content + observation})
    before = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    added = [{"type": "text", "text": observation}] if isinstance(observation, str) else list(observation)
    return (*messages[:-1], {**messages[-1], "content": before + added})
