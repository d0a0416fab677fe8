"""What passes between a scheduler and its engine, with the fields and defaults that ms-swift gives it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, field_validator

Messages = list[dict[str, Any]]


def _name(kind: str) -> str:
    return f"{kind}-{uuid4().hex}"


@dataclass
class InferRequest:
    messages: Messages
    images: list[Any] = field(default_factory=list)
    audios: list[str] = field(default_factory=list)
    videos: list[str] = field(default_factory=list)
    tools: list[Any] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutInferRequest(InferRequest):
    data_dict: dict[str, Any] = field(default_factory=dict)
    """The row's other columns."""
    uuid: str | None = None


@dataclass
class RequestConfig:
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
    name: str
    arguments: Any


@dataclass
class ChatCompletionMessageToolCall:
    function: Function
    type: str = "function"
    id: str = field(default_factory=lambda: _name("toolcall"))


@dataclass
class ChatMessage:
    role: str
    content: Any
    tool_calls: list[ChatCompletionMessageToolCall] | None = None
    reasoning_content: str | None = None


@dataclass
class ChatCompletionResponseChoice:
    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    token_ids: list[int] | None = None
    messages: Messages | None = None


RolloutResponseChoice = ChatCompletionResponseChoice


@dataclass
class UsageInfo:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass
class ChatCompletionResponse:
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    id: str = field(default_factory=lambda: _name("chatcmpl"))
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_token_ids: list[int] | None = None


class RolloutOutput(BaseModel):
    """What a scheduler's `run` gives."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    response: ChatCompletionResponse
    messages: Messages | None = None
    response_token_ids: list[list[int]] = []
    response_loss_mask: list[list[int]] = []
    rollout_infos: dict[str, Any] = {}
    rollout_logprobs: list[list[float]] = []

    @field_validator("response_token_ids", "response_loss_mask", "rollout_logprobs", mode="before")
    @classmethod
    def _by_turn(cls, given: Any) -> Any:
        """Of a single turn, the numbers may come as they are."""
        return [given] if isinstance(given, list | tuple) and given and isinstance(given[0], int | float) else given

    @property
    def ids_and_masks(self) -> list[tuple[int, bool]]:
        """All ids in a row, each with whether it may be learned from."""
        whole = [*self.response_loss_mask] or [[1] * len(ids) for ids in self.response_token_ids]
        pairs = zip(self.response_token_ids, whole, strict=True)
        return [(id, bool(mask)) for ids, masks in pairs for id, mask in zip(ids, masks, strict=True)]


def remove_response(messages: Messages) -> Any:
    """Takes an answer at the end away, and gives its content."""
    if messages and messages[-1]["role"] == "assistant":
        return messages.pop()["content"]
    return None
