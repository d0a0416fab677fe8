"""The arguments of reward functions written for TRL: prompts, completions, token ids and columns of a group.

With a conversational prompt, a completion is a list of messages; with a text as prompt it is the text that follows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from PIL import Image as Pillow

from gateway.types import Image
from mtrl_plugins.trl.rows import PROMPT
from trainer.ledger import Message
from trainer.reward.attempt import Attempt

OWN_ARGUMENTS = (PROMPT, "completion", "completion_ids")
"""Columns that are not passed on."""
Chat = list[dict[str, Any]]


def reward_arguments(attempts: Sequence[Attempt], columns: Sequence[str]) -> dict[str, Any]:
    """The arguments for a group's attempts; `columns` are those of the data set."""
    names = [name for name in columns if name not in OWN_ARGUMENTS]
    return {
        "prompts": [_prompt(attempt) for attempt in attempts],
        "completions": [_completion(attempt) for attempt in attempts],
        "completion_ids": [attempt.response_ids[0] for attempt in attempts],
        **{name: [attempt.columns.get(name) for attempt in attempts] for name in names},
    }


def has_text_prompt(attempt: Attempt) -> bool:
    """Whether the row's prompt is a text, and not a chat."""
    return isinstance(attempt.columns.get(PROMPT), str)


def _prompt(attempt: Attempt) -> str | Chat:
    if has_text_prompt(attempt):
        return str(attempt.columns[PROMPT])
    media = iter(attempt.images)
    return [_with_images(message, media) for message in _opening(attempt)]


def _opening(attempt: Attempt) -> tuple[Message, ...]:
    """The chat before the policy's first turn, with what an environment added to it."""
    return attempt.rollout.ledgers[0].entries[0].messages


def _completion(attempt: Attempt) -> str | Chat:
    if has_text_prompt(attempt):
        return attempt.response
    opening = _opening(attempt)
    media = iter(attempt.images[_count_images(opening) :])
    names: dict[str, str] = {}
    read = [message for entry in attempt.ledger if entry.ids for message in entry.messages]
    return [
        _assistant_message(message, names)
        if message["role"] == "assistant"
        else _with_images(_tool_message(message, names), media)
        for message in read[len(opening) :]
    ]


def _assistant_message(message: Message, names: dict[str, str]) -> dict[str, Any]:
    """A turn of the policy, with its calls as TRL has them; their names are kept for the answers."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        names[call["id"]] = function["name"]
        calls.append({"type": "function", "function": {**function, "arguments": _arguments(function["arguments"])}})
    reasoning = {key: message[key] for key in ("reasoning_content",) if key in message}
    content = {"role": "assistant", "content": message.get("content") or ""} | reasoning
    return content | {"tool_calls": calls} if calls else content


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text or "{}") if isinstance(text, str) else text
    except ValueError:  # The policy's text is not JSON, and stays as it is.
        return text


def _tool_message(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    if message["role"] != "tool":
        return dict(message)
    return {"role": "tool", "name": names.get(message.get("tool_call_id", ""), ""), "content": message["content"]}


def _with_images(message: Message, media: Any) -> dict[str, Any]:
    """The message with PIL images where its placeholders are."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [_image_part(next(media, None)) if part.get("type") == "image" else dict(part) for part in content]
    return {**message, "content": parts}


def _image_part(image: Image | None) -> dict[str, Any]:
    if image is None:
        return {"type": "image"}
    return {"type": "image", "image": Pillow.open(BytesIO(image.data))}


def _count_images(messages: Sequence[Message]) -> int:
    contents = [message.get("content") for message in messages]
    return sum(part.get("type") == "image" for content in contents if isinstance(content, list) for part in content)
