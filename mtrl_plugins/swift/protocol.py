"""Requests and responses between schedulers and engine, with ms-swift's fields and defaults."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, field_validator

Messages = list[dict[str, Any]]
CHAT_INFO = "swift_messages"
"""The key of a rollout's infos with the scheduler's chat."""


def _name(kind: str) -> str:
    return f"{kind}-{uuid4().hex}"


@dataclass
class InferRequest:
    """A chat that the policy continues."""

    messages: Messages
    images: list[Any] = field(default_factory=list)
    audios: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)
    tools: list[Any] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutInferRequest(InferRequest):
    """A chat of a rollout, with its row."""

    data_dict: dict[str, Any] = field(default_factory=dict)
    """The row's other columns."""
    uuid: str | None = None


@dataclass
class RequestConfig:
    """Sampling options of a request."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 1
    stop: list[str] | None = field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    length_penalty: float = 1.0
    return_details: bool = False
    structured_outputs_regex: str | None = None


@dataclass
class Function:
    """A called function with its arguments."""

    name: str
    arguments: Any


@dataclass
class ChatCompletionMessageToolCall:
    """A tool call of a message."""

    function: Function
    type: str = "function"
    id: str = field(default_factory=lambda: _name("toolcall"))


@dataclass
class ChatMessage:
    """A message of a response."""

    role: str
    content: Any
    tool_calls: list[ChatCompletionMessageToolCall] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    """A turn of the policy."""

    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None
    messages: Messages | None = None


RolloutResponseChoice = ChatCompletionResponseChoice


@dataclass
class UsageInfo:
    """Token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class ChatCompletionResponse:
    """The engine's response to a request."""

    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    id: str = field(default_factory=lambda: _name("chatcmpl"))
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_token_ids: list[int] | None = None


class RolloutOutput(BaseModel):
    """The result of a scheduler's `run`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    response: ChatCompletionResponse
    messages: Messages | None = None
    response_token_ids: list[list[int]] = []
    response_loss_mask: list[list[int]] = []
    rollout_infos: dict[str, Any] = {}
    rollout_logprobs: list[list[float]] = []

    @field_validator("response_token_ids", "response_loss_mask", "rollout_logprobs", mode="before")
    @classmethod
    def _by_turn(cls, value: Any) -> Any:
        """The lists by turn; a single turn may be given as a flat list."""
        return [value] if isinstance(value, list | tuple) and value and isinstance(value[0], int | float) else value

    @property
    def ids_and_masks(self) -> list[tuple[int, bool]]:
        """All ids of all turns, each with whether it may be trained."""
        turn_masks = [*self.response_loss_mask] or [[1] * len(ids) for ids in self.response_token_ids]
        pairs = zip(self.response_token_ids, turn_masks, strict=True)
        return [(id, bool(mask)) for ids, masks in pairs for id, mask in zip(ids, masks, strict=True)]


def remove_response(messages: Messages) -> Any:
    """Removes a final assistant message, and returns its content."""
    if messages and messages[-1]["role"] == "assistant":
        return messages.pop()["content"]
    return None
