"""`BaseInteraction`, the interface of interactions, and helpers to read chat messages. Quick to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

Message = dict[str, Any]
"""A chat message: `role`, and `content` that is text or a list of content parts.

Images that the policy was shown appear as `{"type": "image"}`, without their bytes.
"""
Turn = tuple[bool, Any, float | None, dict[str, Any]]
"""Whether the rollout ends, the reply (text, content parts or a `ToolResponse`), the score, the metadata."""


class BaseInteraction:
    """Replies to the policy. One object serves all rollouts; the state of each is kept under its `instance_id`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Starts a rollout's interaction and returns its id. The keyword arguments are the dataset row's."""
        return str(uuid4()) if instance_id is None else instance_id

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        """Replies to the policy's last turn."""
        raise NotImplementedError(f"{type(self).__name__} does not define generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last turn, called if `generate_response` returns None for it."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Drops the state of a rollout. Called even if `start_interaction` failed half-way."""

    async def aclose(self) -> None:
        """Releases what the rollouts shared. Called once, when the gateway stops."""


def last_message_text(messages: Sequence[Message], role: str = "assistant") -> str | None:
    """The text of the last message of a role; None if there is none."""
    for message in reversed(messages):
        if message.get("role") == role:
            return plain_text(message.get("content"))
    return None


def plain_text(content: Any) -> str:
    """The text of a message's content, without its images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(text for text in texts if isinstance(text, str))
