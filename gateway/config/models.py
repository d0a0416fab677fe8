"""The configuration as it is meant: frozen, complete, nothing unknown let through.

Field descriptions are the documentation: the JSON Schema that editors read is made from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, SecretStr

Isolation = Literal["shared", "session", "process"]
Side = Literal["left", "middle", "right"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ResultLimit(Frozen):
    """How much of a result the policy reads. What is cut is marked in the text and counted."""

    chars: PositiveInt | None = None
    """At most this many characters of text."""
    tokens: PositiveInt | None = None
    """At most this many tokens of `tokenizer`."""
    tokenizer: str | None = None
    """A tokenizer's folder or file, as `tokenizers.Tokenizer.from_file` or a model folder gives it."""
    side: Side = "middle"
    """The side that is cut away."""


class Limits(Frozen):
    """Patience and its ends, for every tool of one entry."""

    timeout_s: PositiveFloat = 60.0
    """Deadline of one call, all attempts and the wait for a place included."""
    at_once: PositiveInt = 64
    """Calls of one tool that may run at the same time."""
    queue_limit: Annotated[int, Field(ge=0)] = 4096
    """Calls of one tool that may wait for a place; one more is refused at once."""
    rate_per_s: PositiveFloat | None = None
    """Calls of one tool that may start per second."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further attempts at a call which was never delivered, or which is declared safe to repeat."""
    result_limit: ResultLimit | PositiveInt | None = None
    """How much of a result the policy reads; a number is characters."""
    pure: bool = False
    """The same arguments always give the same answer, and no session is needed."""


class Server(Frozen):
    """One MCP server of `mcp_servers.json`: started here (`command`), or reached (`url`)."""

    command: str | None = None
    """The program to start; it speaks MCP over its standard input and output."""
    args: tuple[str, ...] = ()
    """Its arguments."""
    env: dict[str, str] = {}
    """Environment variables beside the safe ones every child gets (PATH, HOME, ...)."""
    cwd: Path | None = None
    """Its working folder; a relative one is seen from the file."""
    url: str | None = None
    """Where a running server listens."""
    transport: Literal["stdio", "sse", "streamable-http"] | None = None
    """How to speak; a bare `url` is tried as streamable HTTP first, then as SSE."""
    headers: dict[str, SecretStr] = {}
    """HTTP headers for every request."""
    auth_token: SecretStr | None = None
    """Sent as `Authorization: Bearer ...`."""
    isolation: Isolation = "shared"
    """`shared`: one connection for all; `session`: an MCP session per rollout; `process`: a child per rollout."""
    warm: Annotated[int, Field(ge=0)] = 0
    """Connections kept ready beyond those in use (`session`, `process`)."""
    most: PositiveInt = 16
    """Connections (children, for `process`) at the most; further rollouts wait."""
    idle_s: PositiveFloat = 300.0
    """A ready connection unused for this long is closed."""
    connect_timeout_s: PositiveFloat = 30.0
    """Starting, shaking hands and listing the tools must be done by then."""
    result_bytes: PositiveInt = 16 * 1024 * 1024
    """A larger answer of this server is refused."""
