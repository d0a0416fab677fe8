"""The interface that every interaction keeps; the documented signatures, and nothing that is slow to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

Message = dict[str, Any]
"""A chat message: `role`, and `content` that is text or a list of content parts.

Where the policy was shown a picture, `{"type": "image"}` stands, without its bytes: what judges by those has them from
its row.
"""
Turn = tuple[bool, Any, float | None, dict[str, Any]]
"""Should the rollout end, what is said (text, content parts, a `ToolResponse`), the score, the metadata."""


class BaseInteraction:
    """One object answers for many rollouts at once; what belongs to one rollout is kept under its `instance_id`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins one rollout's interaction. The keyword arguments are the dataset row's."""
        return instance_id or str(uuid4())

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Turn:
        """Answers the policy's last turn."""
        raise NotImplementedError(f"{type(self).__name__} does not define generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last turn, asked for where `generate_response` gives None for it."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forgets the rollout. It comes even where `start_interaction` failed half-way."""

    async def aclose(self) -> None:
        """Releases what all rollouts shared; called once, when the gateway stops."""


def said(messages: Sequence[Message], role: str = "assistant") -> str | None:
    """The text of the last message of a role; None where that role has not spoken."""
    for message in reversed(messages):
        if message.get("role") == role:
            return plain_text(message.get("content"))
    return None


def plain_text(content: Any) -> str:
    """A message's content as one text; pictures in it have none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(text for text in texts if isinstance(text, str))
