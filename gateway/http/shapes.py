"""What may be sent and what comes back: requests are checked by these models, and /openapi.json is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.http.reply import Kind
from gateway.types import Outcome

MOST_CALLS = 1024
"""Of one request: each is a task of its own."""

Layout = Literal["chat", "strict", "parts"]
Form = Literal["openai", "spec"]
Json = dict[str, Any]


class Shape(BaseModel):
    """What is not in it is refused, so that a slip of the pen is seen."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class Open(BaseModel):
    """With room for what a chat API adds to its messages."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True)


class NamedFeedback(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")

    name: str


class BeginRequest(Shape):
    id: str = ""
    """The task's own name, for records; the session gets an id of its own."""
    task_id: str = ""
    """The same as `id`."""
    tools: list[str] | None = None
    """The tools that the policy may use; without it, all."""
    create: dict[str, Json] = {}
    """By tool, the arguments of its `create`."""
    feedback: str | NamedFeedback | None = None
    """An interaction by name, or an object with its `name` and its arguments beside it."""
    feedback_args: Json = {}
    """Arguments of the interaction."""
    ttl_s: Annotated[float, Field(gt=0, le=30 * 24 * 3600, allow_inf_nan=False)] | None = None
    """The session is closed when it is not used for this long."""
    strict: bool = False
    """Strict schemas are wanted, so nulls for optional fields are taken back before a call."""
    form: Form = "openai"
    """`openai`: function schemas; `spec`: everything that is known of a tool."""


class CalledFunction(Open):
    name: str
    arguments: str | Json = "{}"
    """JSON as text, exactly as the policy wrote it; an object is written out as text."""


class Call(Open):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class CallsRequest(Open):
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["tool_calls"]}, {"required": ["messages"]}]})

    tool_calls: Annotated[list[Call], Field(max_length=MOST_CALLS)] | None = None
    """The calls of one assistant message, which may be sent whole."""
    messages: list[Json] | None = None
    """Several messages; the calls of their `tool_calls` run at once, and are answered in their order."""
    layout: Layout = "chat"
    """`chat`: media stand in the tool messages; `strict`: in a user message after them; `parts`: in the results."""
    audience: Literal["policy", "loop"] = "policy"
    """Who calls: tools meant for the training loop are hidden from the policy."""


class Calls(Open):
    """The calls found in `CallsRequest.messages`."""

    tool_calls: Annotated[list[Call], Field(max_length=MOST_CALLS)]


class FeedbackRequest(Shape):
    messages: list[Json]
    """The chat so far, the policy's last turn included."""
    layout: Layout = "chat"
    """`parts`: the answer's parts without loss."""


class Function(Shape):
    name: str
    description: str
    parameters: Json
    strict: bool | None = None


class ToolSchema(Shape):
    type: Literal["function"]
    function: Function


class Hints(Shape):
    title: str | None
    read_only: bool
    idempotent: bool
    destructive: bool | None
    open_world: bool | None
    pure: bool


class Spec(Shape):
    name: str
    description: str
    parameters: Json
    audience: Literal["policy", "loop"]
    hints: Hints
    output: Json | None
    owner: str


class Tools(Shape):
    object: Literal["list"]
    data: Sequence[ToolSchema | Spec]


class Begun(Shape):
    id: str
    """Whoever knows it may use the session: keep it secret."""
    tools: Sequence[ToolSchema | Spec]
    feedback: str | None
    expires_at: float | None
    """Unix time; each use moves it."""


class Reward(Shape):
    source: str
    value: float | None
    kind: Literal["call", "feedback", "end"]
    call_id: str | None


class State(Shape):
    id: str
    task_id: str
    tools: list[str]
    feedback: str | None
    strict: bool
    calls: int
    rewards: list[Reward]
    expires_at: float | None


class Closed(Shape):
    id: str
    rewards: list[Reward]


class LiveSession(Shape):
    id: str
    """A digest of the session's id: it can close the session, and open nothing."""
    task_id: str
    tools: list[str]
    feedback: str | None
    calls: int
    running: list[str]
    """The tools that it waits for now."""
    rewards: list[Reward]
    age_s: float
    expires_in_s: float | None
    """Unless it is used before."""


class LiveSessions(Shape):
    object: Literal["list"]
    data: list[LiveSession]


class Tape(Shape):
    name: str
    changed_at: float
    """Unix time."""
    lines_bytes: int
    """Of its lines alone, without its media."""


class Tapes(Shape):
    object: Literal["list"]
    data: list[Tape]


class TapeRead(Tape):
    summary: Json
    """What is on it, in numbers."""
    start: int
    """The first session that is shown here; `from` asks for others."""
    sessions: list[Json]
    """What was asked and answered in each, as far as it can be shown in short."""


class ToolMessage(Shape):
    role: Literal["tool", "user"]
    tool_call_id: str | None = None
    content: str | list[Json]


class Result(Shape):
    tool_call_id: str
    name: str
    outcome: Outcome
    reward: float | None
    done: bool
    """The tool says that the rollout is over."""
    elapsed_s: float
    attempts: int
    structured: Any
    metrics: Json
    reason: str | None
    """For the operator: why the outcome is not `ok`."""
    timing: dict[str, float]
    meta: Json
    parts: list[Json] | None = None
    """With the layout `parts`."""


class Called(Shape):
    messages: list[ToolMessage]
    results: list[Result]


class Heard(Shape):
    done: bool
    message: str
    score: float | None
    metadata: Json
    outcome: Outcome
    reason: str | None
    content: list[Json] | None = None
    """Where the answer is more than text: chat content parts."""
    parts: list[Json] | None = None
    """With the layout `parts`."""


class Health(Shape):
    status: Literal["ok", "degraded"]
    sessions: int | None = None
    tools: int | None = None
    servers: dict[str, Json] | None = None
    set_aside: dict[str, str] | None = None
    """Tools that are not offered, and why."""


class Refusal(Shape):
    type: Kind
    message: str
    remedy: str | None = None
    param: str | None = None


class Refused(Shape):
    error: Refusal
