"""A task is one row of data: what the policy is told, and what the gateway is asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.types import Task as Asked
from trainer.ledger import NOTHING, Message


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    messages: tuple[Message, ...]
    """The chat that the rollout begins with."""
    truth: Any = None
    """The right answer, for the functions that score; the policy never sees it."""
    asked: Asked = field(default_factory=Asked)
    """What the gateway's session is opened with: tools, create arguments, interaction."""
    columns: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """The whole row as it came."""
    place: str = ""
    """File and line, for messages."""

    @property
    def has_feedback(self) -> bool:
        """Whether the row asks for an interaction to answer the policy."""
        return self.asked.feedback is not None or bool(self.asked.feedback_args)
