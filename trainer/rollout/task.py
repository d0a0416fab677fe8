"""The task of a rollout: one row of data, with its opening messages and what to ask of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.types import EMPTY, Audio, Image, Video
from gateway.types import Task as SessionTask
from trainer.ledger import Medium, Message

KIND_COLUMNS = ("kind", "data_source")
"""The columns for the kind of a task, by which metrics are split; the first that a row has counts."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row of data."""

    id: str
    messages: tuple[Message, ...]
    """The opening chat; images are parts of the form `{"type": "image", "image": Image}`."""
    truth: Any = None
    """The ground truth for reward functions; the policy does not see it."""
    session_task: SessionTask = field(default_factory=SessionTask)
    """What to open the gateway's session with: tools, create arguments, interaction."""
    columns: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """The unmodified row."""
    location: str = ""
    """File and line, for messages."""

    @property
    def key(self) -> str:
        """Its id, with where it is from: several data sets may number their tasks alike."""
        return f"{self.location} {self.id}".strip()

    @property
    def kind(self) -> str:
        """The kind of task; empty if its row has none."""
        values = (self.columns.get(column) for column in KIND_COLUMNS)
        return next((str(value) for value in values if value is not None), "")

    @property
    def media(self) -> tuple[Medium, ...]:
        """The media of the opening chat, in order."""
        contents = (message.get("content") for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        values = (part.get(part.get("type")) for part in parts)
        return tuple(medium for medium in values if isinstance(medium, Image | Audio | Video))

    @property
    def has_feedback(self) -> bool:
        """Whether the row asks for an interaction to answer the policy."""
        return self.session_task.feedback is not None or bool(self.session_task.feedback_args)
