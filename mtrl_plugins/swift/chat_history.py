"""Converts between schedulers' chats (text with `<image>` and a list of images) and messages for chat templates.

From the chat that a scheduler returns it finds whether it adds messages, continues the turn, or replaces the history.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gateway.types import Audio, Image, Video
from mtrl_plugins.swift.protocol import Messages, RequestConfig, RolloutInferRequest
from trainer.ledger import Author, Message
from trainer.rollout.steppers import RolloutStart, Step

IMAGE_MARK = "<image>"
REQUEST_COLUMNS = ("messages", "images", "audios", "videos", "tools", "objects", "uuid")
"""Columns that are fields of a request; the others are in its `data_dict`."""


def build_request(opening: RolloutStart) -> RolloutInferRequest:
    """The scheduler's first request for a row; a copy, which the scheduler may change."""
    task = opening.task
    images: list[Any] = []
    messages = [_flatten_message(message, images) for message in task.messages]
    row = deepcopy(dict(task.columns))
    tools = row.get("tools")
    return RolloutInferRequest(
        messages=messages,
        images=images,
        tools=tools if isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools) else None,
        data_dict={name: value for name, value in row.items() if name not in REQUEST_COLUMNS},
        uuid=opening.key,
    )


def build_request_config(opening: RolloutStart) -> RequestConfig:
    """The sampling options as ms-swift's request configuration."""
    sampling = opening.sampling
    return RequestConfig(
        max_tokens=opening.limits.turn_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        logprobs=True,
    )


def _flatten_message(message: Message, images: list[Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_to_text(part, images) for part in content)
    return {**deepcopy({key: value for key, value in message.items() if key != "content"}), "content": content}


def _part_to_text(part: Mapping[str, Any], images: list[Any]) -> str:
    media = part.get(str(part.get("type")))
    if isinstance(media, Image | Audio | Video):
        images.append(f"data:{media.mime};base64,{b64encode(media.data).decode()}")
        return IMAGE_MARK
    return str(part.get("text", ""))


def to_template_messages(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> tuple[Message, ...]:
    """Messages for a chat template, with each image in its place."""
    remaining = iter(images)
    return tuple({**message, "content": _text_to_parts(message.get("content"), remaining)} for message in messages)


def _text_to_parts(content: Any, images: Iterator[Any]) -> Any:
    if not isinstance(content, str) or IMAGE_MARK not in content:
        return content
    first, *others = content.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}]
    for text in others:
        image = next(images, None)
        parts.append({"type": "text", "text": IMAGE_MARK} if image is None else {"type": "image", "image": image})
        parts.append({"type": "text", "text": text})
    return [part for part in parts if part.get("text") != ""]


def split_open_turn(messages: Sequence[dict[str, Any]]) -> tuple[Messages, str]:
    """The chat without a final assistant message, and the text of that message, which the policy continues."""
    chat = list(messages)
    while chat and chat[-1].get("role") == "assistant" and not chat[-1].get("content"):
        chat.pop()  # An empty message means that the turn before it continues.
    if chat and chat[-1].get("role") == "assistant":
        return chat[:-1], str(chat[-1]["content"])
    return chat, ""


@dataclass(frozen=True)
class ChatState:
    """The chat as the scheduler left it, and the policy's turn since then."""

    chat: Messages
    images: int
    prefix: str = ""
    """The text of the turn that was there before the policy's."""
    text: str = ""
    ids: tuple[int, ...] = ()
    """The ids of `said`, without an end token."""

    @property
    def turn(self) -> str:
        return self.prefix + self.text

    @property
    def whole(self) -> Messages:
        return [*deepcopy(self.chat), {"role": "assistant", "content": self.turn}]


def start_history(request: RolloutInferRequest) -> tuple[ChatState, Step]:
    """A step that replaces the history by the chat of the request."""
    chat, prefix = split_open_turn(request.messages)
    step = Step(history=to_template_messages(chat, request.images), insert=prefix)
    return ChatState(deepcopy(chat), len(request.images), prefix), step


def next_step(
    state: ChatState, request: RolloutInferRequest, decode: Callable[[Sequence[int]], str]
) -> tuple[ChatState, Step]:
    """The next state and step, from the difference between the known chat and the scheduler's."""
    length = len(state.chat)
    chat = _drop_empty_turns(request.messages)
    turn = chat[length].get("content") if len(chat) > length and chat[length].get("role") == "assistant" else None
    if chat[:length] != state.chat or not isinstance(turn, str):
        return start_history(request)
    rest = chat[length + 1 :]
    if not rest:
        return _continue_turn(state, turn, request, decode)
    new, prefix = split_open_turn(rest)
    if not new or turn.strip() != state.turn.strip():
        return start_history(request)
    step = Step(messages=to_template_messages(new, request.images[state.images :]), insert=prefix)
    return ChatState(deepcopy([*chat[: length + 1], *new]), len(request.images), prefix), step


def _continue_turn(
    state: ChatState, turn: str, request: RolloutInferRequest, decode: Callable[[Sequence[int]], str]
) -> tuple[ChatState, Step]:
    if not turn.startswith(state.prefix):
        return start_history(request)
    after = turn.removeprefix(state.prefix)
    count = _count_kept_ids(state, after, decode)
    insert = after[len(decode(state.ids[:count])) :] if count else after
    return ChatState(state.chat, len(request.images), turn), Step(author=Author.FEEDBACK, insert=insert, keep_ids=count)


def _count_kept_ids(state: ChatState, after: str, decode: Callable[[Sequence[int]], str]) -> int:
    """The number of leading ids whose text is a prefix of `after`."""
    if after.startswith(state.text):
        return len(state.ids)
    low, high = 0, len(state.ids)
    while low < high:  # Bisects for the most ids whose text is not longer than `after`.
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(decode(state.ids[:middle])) <= len(after) else (low, middle - 1)
    while low and not after.startswith(decode(state.ids[:low])):
        low -= 1
    return low


def _drop_empty_turns(messages: Sequence[dict[str, Any]]) -> Messages:
    chat = list(messages)
    while chat and chat[-1].get("role") == "assistant" and not chat[-1].get("content"):
        chat.pop()
    return chat


def find_masked_spans(
    turns: Sequence[tuple[int, ...]], returned: Sequence[tuple[int, bool]], ends: frozenset[int]
) -> list[list[tuple[int, int]]]:
    """The spans of ids in each policy turn that a scheduler's loss mask excludes from training.

    Returned ids that the policy did not write are skipped; a turn that is not returned is trained.
    """
    ids, position = [id for id, _ in returned], 0
    masked: list[list[tuple[int, int]]] = []
    for turn in turns:
        text = turn[:-1] if turn and turn[-1] in ends else turn
        start = _find_ids(ids, text, position)
        if start is None or not text:
            masked.append([])
            continue
        position = start + len(text)
        masks = [mask for _, mask in returned[start:position]]
        if len(turn) > len(text):  # An end token that is not returned has the mask of the token before.
            masks.append(returned[position][1] if position < len(ids) and ids[position] == turn[-1] else masks[-1])
        masked.append(_masked_spans(masks))
    return masked


def _find_ids(ids: Sequence[int], text: Sequence[int], start: int) -> int | None:
    length = len(text)
    starts = range(start, len(ids) - length + 1)
    return next((index for index in starts if tuple(ids[index : index + length]) == tuple(text)), None)


def _masked_spans(masks: Sequence[bool]) -> list[tuple[int, int]]:
    spans, start = [], 0
    for is_trained, run in groupby(masks):
        length = sum(1 for _ in run)
        if not is_trained:
            spans.append((start, start + length))
        start += length
    return spans
