"""The same chat twice: as schedulers have it, text with `<image>` and pictures beside, and as templates take it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from gateway.types import Audio, Image, Video
from trainer.ledger import Message
from trainer.steps import Opening
from trainer.swift.protocol import Messages, RequestConfig, RolloutInferRequest

MARK = "<image>"
BESIDE = ("messages", "images", "audios", "videos", "tools", "objects", "uuid")
"""Columns that are fields of a request; `data_dict` has the others."""


def request_of(opening: Opening) -> RolloutInferRequest:
    """A row, as a scheduler is given it. Its objects are the scheduler's own, to change as it likes."""
    task = opening.task
    images: list[Any] = []
    messages = [_flat(message, images) for message in task.messages]
    row = deepcopy(dict(task.columns))
    tools = row.get("tools")
    return RolloutInferRequest(
        messages=messages,
        images=images,
        tools=tools if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools) else None,
        data_dict={name: value for name, value in row.items() if name not in BESIDE},
        uuid=opening.key,
    )


def config_of(opening: Opening) -> RequestConfig:
    sampling = opening.sampling
    return RequestConfig(
        max_tokens=opening.limits.turn_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        logprobs=True,
    )


def _flat(message: Message, images: list[Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text(part, images) for part in content)
    return {**deepcopy({key: value for key, value in message.items() if key != "content"}), "content": content}


def _text(part: Mapping[str, Any], images: list[Any]) -> str:
    held = part.get(str(part.get("type")))
    if isinstance(held, Image | Audio | Video):
        images.append(f"data:{held.mime};base64,{b64encode(held.data).decode()}")
        return MARK
    return str(part.get("text", ""))


def laid_out(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> tuple[Message, ...]:
    """As templates take it: each picture in its place."""
    left = iter(images)
    return tuple({**message, "content": _parts(message.get("content"), left)} for message in messages)


def _parts(content: Any, images: Iterator[Any]) -> Any:
    if not isinstance(content, str) or MARK not in content:
        return content
    first, *others = content.split(MARK)
    parts = [{"type": "text", "text": first}]
    for text in others:
        image = next(images, None)
        parts.append({"type": "text", "text": MARK} if image is None else {"type": "image", "image": image})
        parts.append({"type": "text", "text": text})
    return [part for part in parts if part.get("text") != ""]


def parted(messages: Sequence[dict[str, Any]]) -> tuple[Messages, str]:
    """A chat, and what of the policy's next turn it has already."""
    chat = list(messages)
    while chat and chat[-1].get("role") == "assistant" and not chat[-1].get("content"):
        chat.pop()  # It says that the turn before it goes on.
    if chat and chat[-1].get("role") == "assistant":
        return chat[:-1], str(chat[-1]["content"])
    return chat, ""
