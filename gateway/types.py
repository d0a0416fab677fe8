"""The types shared by gateway and trainer: tool calls, results, outcomes, media parts, feedback, tasks and contexts.

Uses only the standard library, so that a trainer can import the types without a server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

Json = Any
"""A value that `json.loads` can return."""

EMPTY: Mapping[str, Any] = MappingProxyType({})


STATE_HASH_PREFIX = "sha256:"
"""What the hash of a state begins with. Other texts say why there is none, and equal no hash."""


class Outcome(StrEnum):
    """How a call ended. Only `error` and `invalid` can be the policy's fault."""

    OK = "ok"
    ERROR = "error"
    """The tool reported an error."""
    INVALID = "invalid"
    """The policy's error: an unknown tool, or arguments that do not match the schema."""
    TIMEOUT = "timeout"
    """No answer within the deadline."""
    UNAVAILABLE = "unavailable"
    """Never delivered: server down, queue full, circuit breaker open. Repeating it is safe."""
    UNKNOWN = "unknown"
    """Delivered, but no answer came back. Repeating it may not be safe."""
    CANCELLED = "cancelled"

    @property
    def is_infrastructure(self) -> bool:
        """Whether the infrastructure failed, so that the call must not count as the policy's failure."""
        return self in (Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.UNKNOWN, Outcome.CANCELLED)


@dataclass(frozen=True, slots=True)
class Text:
    """A text part."""

    text: str


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Media:
    data: bytes = field(repr=False)
    mime: str

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        from hashlib import sha256  # OpenSSL is slow to load, and `--help` needs none.

        return sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Image(_Media):
    """An encoded image."""

    mime: str = "image/png"


@dataclass(frozen=True, slots=True)
class Audio(_Media):
    """Encoded audio."""

    mime: str = "audio/wav"


@dataclass(frozen=True, slots=True)
class Video(_Media):
    """An encoded video."""

    mime: str = "video/mp4"


@dataclass(frozen=True, slots=True)
class Resource:
    """A document that a tool embeds (`text` or `data` is set) or links to (neither is set)."""

    uri: str
    mime: str | None = None
    text: str | None = None
    data: bytes | None = field(default=None, repr=False)
    name: str | None = None
    description: str | None = None


Part = Text | Image | Audio | Video | Resource
Audience = Literal["policy", "loop"]
_TEXT = frozenset({Text})


def are_text(parts: Iterable[Part]) -> bool:
    """Whether there are no parts but text."""
    return _TEXT.issuperset(map(type, parts))


@dataclass(frozen=True, slots=True)
class Hints:
    """What a tool's owner declares about it; used only to decide whether repeating a call is safe."""

    title: str | None = None
    read_only: bool = False
    idempotent: bool = False
    destructive: bool | None = None
    open_world: bool | None = None
    pure: bool = False
    """Declared by the operator: the same arguments give the same result, and no session is needed."""

    @property
    def repeatable(self) -> bool:
        return self.pure or self.read_only or self.idempotent


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as offered. `parameters` is the JSON Schema exactly as its owner wrote it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    audience: Audience = "policy"
    hints: Hints = Hints()
    output: Mapping[str, Any] | None = None
    owner: str = ""
    """Its origin (`tool_configs/math.yaml`, `mcp server 'time'`), for error messages."""
    mcp: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """Fields of an MCP server's tool that only MCP clients use, passed on unchanged: `_meta`, `execution`, `icons`."""
    instructions: str = ""
    """What its MCP server says about itself, where the policy is to read that (`instructions: system`)."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it; `arguments` is the raw text."""

    id: str
    name: str
    arguments: str = "{}"
    policy_name: str = field(default="", compare=False, repr=False)
    """The name that the policy wrote, where `name` is the owner's; empty where they are the same."""

    def renamed(self, name: str) -> ToolCall:
        """The call under its owner's name."""
        return self if name == self.name else ToolCall(self.id, name, self.arguments, self.policy_name or self.name)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call."""

    parts: tuple[Part, ...] = ()
    outcome: Outcome = Outcome.OK
    reward: float | None = None
    done: bool = False
    """The tool ends the rollout."""
    structured: Json = None
    metrics: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """Metrics that the tool reports."""
    reason: str | None = None
    """Why the outcome is not `ok`, for the operator; the policy reads `parts`."""
    attempts: int = 1
    elapsed_s: float = 0.0
    timing: Mapping[str, float] = field(default_factory=lambda: EMPTY)
    """Seconds by phase: `queue`, `connect`, `upstream`, `parse`."""
    meta: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """The MCP server's own `_meta`, passed on unchanged."""

    @property
    def text(self) -> str:
        """The text parts, joined by newlines."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))


def with_times(result: ToolResult, timing: Mapping[str, float], elapsed_s: float | None = None) -> ToolResult:
    """The result with the time that it took; each call needs it, and `dataclasses.replace` takes twice as long."""
    elapsed_s = result.elapsed_s if elapsed_s is None else elapsed_s
    about = (result.parts, result.outcome, result.reward, result.done, result.structured, result.metrics, result.reason)
    return ToolResult(*about, result.attempts, elapsed_s, timing, result.meta)


@dataclass(frozen=True, slots=True)
class Feedback:
    """One turn of an interaction; the score is for the policy's turn that it responds to."""

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
    """What a rollout needs from a gateway when it opens a session."""

    id: str = ""
    tools: tuple[str, ...] | None = None
    """The tools that the policy may use; None means all tools meant for a policy."""
    create: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: EMPTY)
    """Keyword arguments of each tool's `create`, by tool."""
    feedback: str | None = None
    """Name of the interaction; None means `gsm8k`, if it exists and feedback is requested."""
    feedback_args: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    ttl_s: float | None = None
    rollout: str = ""
    """Which of the task's rollouts this is; a tape uses it to tell them apart."""
    state: str = ""
    """The name of the prepared state that it begins from, among the `states` of its servers."""
    hash_state: bool = False
    """Whether finishing the session hashes the states that its servers and sandboxes have then."""
    session_id: str = ""
    """The session's id, which nobody can guess; made by the gateway if it is empty."""


ProgressHandler = Callable[[float, float | None, str | None], Awaitable[None]]
RequestHandler = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
RequestsHandler = Callable[[Mapping[str, Mapping[str, Any]]], Awaitable[Mapping[str, Any]]]
LogHandler = Callable[[str, Mapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Context:
    """The caller of a tool, with callbacks for progress, logs and requests from the tool's server."""

    audience: Audience = "policy"
    """Tools for the training loop do not exist for a policy."""
    on_progress: ProgressHandler | None = None
    answer_request: RequestHandler | None = None
    """Answers `sampling/createMessage`, `elicitation/create`, `roots/list`; raises `RequestDeclined` if it cannot."""
    meta: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    on_log: LogHandler | None = None
    """Receives the log messages (`notifications/message`) that a tool sends while it runs."""
    answer_requests: RequestsHandler | None = None
    """Answers several requests together, by key; if None, they are passed to `answer_request` one by one."""
    is_only_client: bool = False
    """Whether no other client uses this gateway, so that what a shared server learns of this one is told to nobody."""
    on_task: Callable[[], None] | None = None
    """Told that the tool's server has made a task of the call: it takes long."""


DEFAULT_CONTEXT = Context()
"""A context without callbacks, as most rollouts use it."""
