"""What crosses the line between a policy and its tools; nothing here knows how a tool is reached.

Standard library only, so that a trainer can speak these types without importing a server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Literal

Json = Any
"""A value that `json.loads` can return."""

EMPTY: Mapping[str, Any] = MappingProxyType({})


class Outcome(StrEnum):
    """How a call ended. Only `error` and `invalid` say something about what the policy did."""

    OK = "ok"
    ERROR = "error"
    """The tool itself said no."""
    INVALID = "invalid"
    """The policy's mistake: an unknown name, or arguments that the schema refuses."""
    TIMEOUT = "timeout"
    """No answer within the deadline."""
    UNAVAILABLE = "unavailable"
    """Never delivered: server down, queue full, breaker open. Repeating it is safe."""
    UNKNOWN = "unknown"
    """Delivered, never answered. Repeating it is not safe."""
    CANCELLED = "cancelled"

    @property
    def infrastructure(self) -> bool:
        """True where the policy is not to blame, so that nothing may be scored as its failure."""
        return self in (Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.UNKNOWN, Outcome.CANCELLED)


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Medium:
    data: bytes = field(repr=False)
    mime: str

    @property
    def digest(self) -> str:
        """The content's address: equal bytes have equal digests, wherever they came from."""
        return sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Image(_Medium):
    mime: str = "image/png"


@dataclass(frozen=True, slots=True)
class Audio(_Medium):
    mime: str = "audio/wav"


@dataclass(frozen=True, slots=True)
class Video(_Medium):
    mime: str = "video/mp4"


@dataclass(frozen=True, slots=True)
class Resource:
    """A document that a tool embeds (`text` or `data` set), or one it only points at (neither set)."""

    uri: str
    mime: str | None = None
    text: str | None = None
    data: bytes | None = field(default=None, repr=False)
    name: str | None = None
    description: str | None = None


Part = Text | Image | Audio | Video | Resource
Audience = Literal["policy", "loop"]


@dataclass(frozen=True, slots=True)
class Hints:
    """What a tool's owner says of it. A promise, not a proof: it decides only whether a repeat is safe."""

    title: str | None = None
    read_only: bool = False
    idempotent: bool = False
    destructive: bool | None = None
    open_world: bool | None = None
    pure: bool = False
    """Declared by the operator: the same arguments give the same answer, and no session is needed."""

    @property
    def repeatable(self) -> bool:
        return self.pure or self.read_only or self.idempotent


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as it is offered. `parameters` is the JSON Schema exactly as its owner wrote it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    audience: Audience = "policy"
    hints: Hints = Hints()
    output: Mapping[str, Any] | None = None
    owner: str = ""
    """Who brought it (`tool_configs/math.yaml`, `mcp server 'time'`), for messages about collisions."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it: `arguments` is its text, not our reading of it."""

    id: str
    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class ToolResult:
    parts: tuple[Part, ...] = ()
    outcome: Outcome = Outcome.OK
    reward: float | None = None
    done: bool = False
    """The tool says that the rollout is over."""
    structured: Json = None
    metrics: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """What the tool reports about itself."""
    reason: str | None = None
    """For the operator: why an outcome is not `ok`. The policy reads `parts` instead."""
    attempts: int = 1
    elapsed_s: float = 0.0
    timing: Mapping[str, float] = field(default_factory=lambda: EMPTY)
    """Seconds by phase: `queue`, `connect`, `upstream`, `parse`."""
    meta: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """The upstream's own `_meta`, passed through untouched."""

    @property
    def text(self) -> str:
        """The text parts in order, as a policy without eyes reads them."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Feedback:
    """One turn of an interaction; the score belongs to the policy's turn that it answers."""

    parts: tuple[Part, ...] = ()
    score: float = 0.0
    done: bool = False
    metadata: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    outcome: Outcome = Outcome.OK
    reason: str | None = None

    @property
    def message(self) -> str:
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Task:
    """What one rollout asks of a gateway."""

    id: str = ""
    tools: tuple[str, ...] | None = None
    """The tools this rollout may use; None means every tool meant for the policy."""
    create: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: EMPTY)
    """Per tool, the keyword arguments of its `create`."""
    feedback: str | None = None
    """The interaction by name; None means `gsm8k` where there is one and feedback is asked for."""
    feedback_args: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    ttl_s: float | None = None
    rollout: str = ""
    """Which of the rollouts of one task this is: where it is given, a tape tells them apart by it."""


Progress = Callable[[float, float | None, str | None], Awaitable[None]]
Ask = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
Inputs = Callable[[Mapping[str, Mapping[str, Any]]], Awaitable[Mapping[str, Any]]]
Notice = Callable[[str, Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Context:
    """Who is behind a call: where its progress goes, and who can answer when a tool asks back."""

    audience: Audience = "policy"
    """A policy that names a tool meant for the loop is told that there is none."""
    progress: Progress | None = None
    ask: Ask | None = None
    """Answers `sampling/createMessage`, `elicitation/create`, `roots/list`; raises `Refused` where it can't."""
    meta: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    notice: Notice | None = None
    """Hears the log messages (`notifications/message`) that a tool sends while it runs."""
    inputs: Inputs | None = None
    """Answers several questions together, by their keys; where it is None, they are asked one by one."""


ALONE = Context()
"""The context of a call that nobody watches: most rollouts."""
