"""A task is one row of data: what the policy is told, and what the gateway is asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.types import Audio, Image, Video
from gateway.types import Task as Asked
from trainer.ledger import NOTHING, Medium, Message

KIND = "kind"
"""The column that tells kinds of tasks apart, where nobody named another."""


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    messages: tuple[Message, ...]
    """The chat that the rollout begins with; a picture stands in its part: `{"type": "image", "image": Image}`."""
    truth: Any = None
    """The right answer, for the functions that score; the policy never sees it."""
    asked: Asked = field(default_factory=Asked)
    """What the gateway's session is opened with: tools, create arguments, interaction."""
    columns: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """The whole row as it came."""
    place: str = ""
    """File and line, for messages."""

    def kind(self, column: str = KIND) -> str:
        """What its row says in that column; empty where it says nothing."""
        said = self.columns.get(column)
        return "" if said is None else str(said)

    @property
    def media(self) -> tuple[Medium, ...]:
        """In the order in which the chat has them."""
        contents = (message.get("content") for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        held = (part.get(part.get("type")) for part in parts)
        return tuple(medium for medium in held if isinstance(medium, Image | Audio | Video))

    @property
    def has_feedback(self) -> bool:
        """Whether the row asks for an interaction to answer the policy."""
        return self.asked.feedback is not None or bool(self.asked.feedback_args)
