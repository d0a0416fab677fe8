"""Pydantic models of the HTTP API's requests and responses, from which /openapi.json is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.http.exchange import ErrorType
from gateway.types import Outcome

MAX_CALLS = 1024
"""Calls in one request; each runs as a task of its own."""

Layout = Literal["chat", "strict", "parts"]
Form = Literal["openai", "spec"]
Json = dict[str, Any]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""A number that every JSON reader holds exactly."""


class StrictModel(BaseModel):
    """A model that refuses unknown fields, so that a misspelled field is noticed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class LenientModel(BaseModel):
    """A model that ignores unknown fields, because chat APIs add fields to their messages."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True)


class NamedFeedback(BaseModel):
    """An interaction's name, with its arguments as further keys."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str


class SessionRequest(StrictModel):
    """Body of POST /v1/sessions."""

    id: str = ""
    """Name of the task, for records; the session gets an id of its own."""
    task_id: str = ""
    """The same as `id`."""
    tools: list[str] | None = None
    """Tools that the policy may use; all if left out."""
    create: dict[str, Json] = {}
    """Arguments of `create`, by tool."""
    feedback: str | NamedFeedback | None = None
    """Name of an interaction, or an object with its `name` and further keys as its arguments."""
    feedback_args: Json = {}
    """Arguments of the interaction."""
    ttl_s: Annotated[float, Field(gt=0, le=30 * 24 * 3600, allow_inf_nan=False)] | None = None
    """Idle time after which the session is closed."""
    state: Annotated[str, Field(max_length=200)] = ""
    """Name of the prepared state that it begins from, among the `states` of its servers."""
    hash_state: bool = False
    """Return the hashes of the states of its servers and sandboxes when the session is closed."""
    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{32,64}$")] | None = None
    """The session's id, so that it can be closed even if no answer arrives; random, since who knows it may use it."""
    strict: bool = False
    """Return strict schemas, and remove nulls for optional arguments before a call."""
    form: Form = "openai"
    """`openai`: function schemas; `spec`: everything that is known about a tool."""


class CalledFunction(LenientModel):
    """The function of an OpenAI tool call."""

    name: str
    arguments: str | Json = "{}"
    """JSON text, exactly as the policy wrote it; an object is converted to text."""


class Call(LenientModel):
    """An OpenAI tool call."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class CallsRequest(LenientModel):
    """Body of POST /v1/calls and of POST /v1/sessions/{id}/calls."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["tool_calls"]}, {"required": ["messages"]}]})

    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS)] | None = None
    """The calls of one assistant message; the entire message may be sent."""
    messages: list[Json] | None = None
    """Several messages; the calls in their `tool_calls` run concurrently, and results keep their order."""
    layout: Layout = "chat"
    """`chat`: media in the tool messages; `strict`: in a user message after them; `parts`: in the results."""
    audience: Literal["policy", "loop"] = "policy"
    """The caller: tools meant for the training loop are hidden from the policy."""


class Calls(LenientModel):
    """The `tool_calls` of a message in `CallsRequest.messages`."""

    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS)]


class FeedbackRequest(StrictModel):
    """Body of POST /v1/sessions/{id}/feedback."""

    messages: list[Json]
    """The chat so far, including the policy's last turn."""
    layout: Layout = "chat"
    """`parts`: include the feedback's parts without loss."""


class Function(StrictModel):
    """A function in a tool schema."""

    name: str
    description: str
    parameters: Json
    strict: bool | None = None


class ToolSchema(StrictModel):
    """An OpenAI function schema."""

    type: Literal["function"]
    function: Function


class Hints(StrictModel):
    """What a tool's owner declares about it."""

    title: str | None
    read_only: bool
    idempotent: bool
    destructive: bool | None
    open_world: bool | None
    pure: bool


class Spec(StrictModel):
    """Everything that is known about a tool."""

    name: str
    description: str
    parameters: Json
    audience: Literal["policy", "loop"]
    hints: Hints
    output: Json | None
    owner: str


class Tools(StrictModel):
    """Response of GET /v1/tools."""

    object: Literal["list"]
    data: Sequence[ToolSchema | Spec]


class SessionResponse(StrictModel):
    """Response of POST /v1/sessions."""

    id: str
    """Gives access to the session: keep it secret."""
    tools: Sequence[ToolSchema | Spec]
    feedback: str | None
    expires_at: float | None
    """Unix time; each use extends it."""
    finish_s: float
    """How long the last rewards, such as a grade, may take when it is closed, in seconds."""


class Reward(StrictModel):
    """A reward and its source."""

    source: str
    value: float | None
    kind: Literal["call", "feedback", "end", "count"]
    call_id: str | None


class SessionState(StrictModel):
    """Response of GET /v1/sessions/{id}."""

    id: str
    task_id: str
    tools: list[str]
    feedback: str | None
    strict: bool
    calls: Count
    rewards: list[Reward]
    expires_at: float | None


class ClosedSession(StrictModel):
    """Response to closing a session."""

    id: str
    rewards: list[Reward]
    states: dict[str, str] = {}
    """The hashes of the states of its servers and sandboxes, if the session was opened with `hash_state`."""


class ToolMessage(StrictModel):
    """A chat message with a tool's result."""

    role: Literal["tool", "user"]
    tool_call_id: str | None = None
    content: str | list[Json]


class Result(StrictModel):
    """The result of one call."""

    tool_call_id: str
    name: str
    outcome: Outcome
    reward: float | None
    done: bool
    """The tool ended the rollout."""
    elapsed_s: float
    attempts: Count
    structured: Any
    metrics: Json
    reason: str | None
    """For the operator: why the outcome is not `ok`."""
    timing: dict[str, float]
    meta: Json
    parts: list[Json] | None = None
    """Only with the layout `parts`."""


class CallsResponse(StrictModel):
    """Response of the two routes that run calls."""

    messages: list[ToolMessage]
    results: list[Result]


class FeedbackResponse(StrictModel):
    """Response of POST /v1/sessions/{id}/feedback."""

    done: bool
    message: str
    score: float | None
    metadata: Json
    outcome: Outcome
    reason: str | None
    content: list[Json] | None = None
    """Chat content parts, if the feedback is more than text."""
    parts: list[Json] | None = None
    """Only with the layout `parts`."""


class ServerState(StrictModel):
    """The state of an MCP server."""

    state: Literal["starting", "up", "unresponsive", "restarting", "down", "stale"]
    """`unresponsive`: a ping is awaited; `stale`: down, and its last known tools are still offered."""
    reason: str
    """Why it is not up."""
    remedy: str
    tools: Count
    transport: str
    protocol: str
    """Version of MCP."""
    reconnects: Count
    """Times that it was restarted or connected to again."""
    cut: Count
    """Connections that were cut because it sent without end."""
    last_loss: str
    """Why its connection was lost last, also after it has recovered."""
    quarantined: dict[str, str]
    """Tools that are not offered, with the reason."""


class ServerDetails(ServerState):
    """Response of GET /v1/servers/{id} and of POST /v1/servers/{id}/restart."""

    name: str
    state_since: float
    """Unix time."""
    processes: list[Annotated[int, Field(ge=1, le=2**31 - 1)]]
    """Process ids."""
    cuts: dict[str, Count]
    """Connections that were cut, by reason."""
    log: str
    """The last of what its processes wrote to standard error, those before a restart included."""


class ReloadRefusal(StrictModel):
    """A configuration that was refused, so that the one before it stays in use."""

    error: str
    at: float
    """Unix time."""


class Sandboxes(StrictModel):
    """Counts of sandboxes in the gateway's process."""

    starts: Count
    start_s: float
    """Seconds of all starts together."""
    running: Count
    refusals: Count
    """Sandboxes that could not be started."""
    without_group: Count = 0
    """Sandboxes without a control group: their limits hold for each process."""
    machines: dict[str, int] = {}
    """Those that run on other machines."""
    limits_hit: dict[str, Count]
    """By limit: memory, processes, output, time."""
    grades: dict[str, Count] = {}
    """By end: graded, why there was no reward, unavailable; and rewards that a policy had planted."""


class Health(StrictModel):
    """Response of GET /healthz."""

    status: Literal["ok", "degraded"]
    sessions: Count | None = None
    tools: Count | None = None
    servers: dict[str, ServerState] | None = None
    set_aside: dict[str, str] | None = None
    """Tools that are not offered, with the reason."""
    clashes: dict[str, str] | None = None
    """Tools whose name another one has, with what became of them."""
    starting: list[str] | None = None
    """Servers that are being connected to for the first time."""
    reload_refusal: ReloadRefusal | None = None
    """Why the changed files are not in use, if they were refused."""
    sandboxes: Sandboxes | None = None


class Readiness(StrictModel):
    """Response of GET /readyz."""

    status: Literal["ok", "degraded"]
    """`degraded`: some servers are not up."""


class ErrorDetail(StrictModel):
    """What is wrong, where, and how to fix it."""

    type: ErrorType
    message: str
    remedy: str | None = None
    param: str | None = None


class ErrorResponse(StrictModel):
    """Every response with a status of 400 or above."""

    error: ErrorDetail
