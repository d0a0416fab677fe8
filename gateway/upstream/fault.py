"""What a failed request means is decided once: whether it was delivered, and whether repeating it is safe."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR

from gateway.errors import GatewayError
from gateway.types import Context, Outcome

JSONRPC_ERROR = "mtrl/error"
"""In a result's `meta`: code and data of the protocol error that stood in its place, for a front to repeat."""


class UpstreamError(GatewayError):
    """A request to an MCP server that gave no result: how it ended, and why."""

    def __init__(self, outcome: Outcome, reason: str, *, code: int = INTERNAL_ERROR, data: Any = None) -> None:
        self.outcome, self.reason, self.code, self.data = outcome, reason, code, data
        super().__init__(reason)


@dataclass(eq=False, slots=True)
class Flight:
    """One request on its way; the transport notes on it what no JSON-RPC answer can say."""

    context: Context
    sent: bool = False
    refused: str | None = None
    """Why the server cannot have seen it."""
    unreachable: bool = False
    """Nobody listens where it should be."""
    broken: str | None = None
    """Why its answer was lost on the way."""
    status: int | None = None
    challenge: str | None = None
    session_lost: bool = False


flight_now: ContextVar[Flight | None] = ContextVar("flight_now", default=None)
"""The request in whose name this code runs: the SDK's HTTP transport carries its sender's context along."""


@dataclass(slots=True)
class Ending:
    """Why a connection is over."""

    reason: str
    remedy: str = ""
    elsewhere: bool = False
    """It answers, but not over this transport: another one may fit."""
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return "; ".join((self.reason, *self.notes))


AUTH_REMEDY = "set `auth_token`, or `headers`, of this server"
SDK_CLOSED = "Connection closed"
"""What the SDK says of every request under way when the streams end."""


def explain(error: MCPError, flight: Flight, ending: Ending | None) -> UpstreamError:
    """The typed ending of a request that the dispatcher reports as failed."""
    code = error.code
    if flight.status in (401, 403):
        return UpstreamError(Outcome.UNAVAILABLE, f"{unauthorized(flight)}: {AUTH_REMEDY}", code=code)
    if flight.session_lost:
        reason = f"the server no longer knows this session (HTTP {flight.status})"
        return UpstreamError(Outcome.UNAVAILABLE, reason, code=code)
    if flight.refused:
        return UpstreamError(Outcome.UNAVAILABLE, flight.refused, code=code)
    if flight.broken:
        return UpstreamError(Outcome.UNKNOWN, flight.broken, code=code)
    if code == CONNECTION_CLOSED and error.message == SDK_CLOSED:
        outcome = Outcome.UNKNOWN if flight.sent else Outcome.UNAVAILABLE
        return UpstreamError(outcome, str(ending) if ending else error.message, code=code)
    return UpstreamError(Outcome.ERROR, error.message, code=code, data=error.error.data)


def unauthorized(flight: Flight) -> str:
    asked = f" (it asks for: {flight.challenge[:200]})" if flight.challenge else ""
    return f"the server refuses us with HTTP {flight.status}{asked}"
