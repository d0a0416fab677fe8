"""Errors of MCP requests: whether a failed request was delivered, and so whether repeating it is safe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR

from gateway.errors import GatewayError
from gateway.types import Context, Outcome

JSONRPC_ERROR = "mtrl/error"
"""Key in a result's `meta`: code and data of the JSON-RPC error it replaces, so that our MCP server can repeat it."""


class UpstreamError(GatewayError):
    """A request to an MCP server that failed, with its outcome and the reason.

    `is_protocol_error`: an MCP client gets it as a JSON-RPC error, whatever its code.
    `policy_text`: what the policy is told, if that is not the reason.
    """

    def __init__(
        self,
        outcome: Outcome,
        reason: str,
        *,
        code: int = INTERNAL_ERROR,
        data: Any = None,
        is_protocol_error: bool = False,
        policy_text: str = "",
    ) -> None:
        self.outcome, self.reason, self.code, self.data = outcome, reason, code, data
        self.policy_text = policy_text
        self.is_protocol_error = is_protocol_error or code != INTERNAL_ERROR
        super().__init__(reason)


@dataclass(eq=False, slots=True)
class PendingRequest:
    """One request under way. The transport records here what a JSON-RPC error cannot express."""

    context: Context
    sent: bool = False
    began_at: float = 0.0
    had_fair_share: bool = False
    """Whether its server had a fair share of the call's time when the request ended."""
    undelivered_reason: str | None = None
    """Why the server cannot have acted on it."""
    unreachable: bool = False
    """Nothing listens at the server's address."""
    lost_reason: str | None = None
    """Why the answer was lost; the server may have acted on the request."""
    http_status: int | None = None
    auth_challenge: str | None = None
    auth_reason: str | None = None
    """Why there are no credentials that the server would accept."""
    auth_remedy: str = ""
    """What the operator can do about a refusal of our credentials."""
    session_lost: bool = False
    credentials_wanted_at: float | None = None
    """Since when it waits for credentials; the server has nothing to answer meanwhile."""
    credentials_s: float = 0.0
    """For how long it waited for credentials before."""
    cuts: Counter[str] = field(default_factory=Counter)
    """Floods for which the connections of its server were cut, by reason."""

    def credentials_wait_s(self, now: float) -> float:
        """For how long it has waited for credentials."""
        return self.credentials_s + (0.0 if self.credentials_wanted_at is None else now - self.credentials_wanted_at)


current_request: ContextVar[PendingRequest | None] = ContextVar("current_request", default=None)
"""The request on whose behalf this code runs; tasks of the transports inherit it from the sender."""


def record_cut(reason: str) -> None:
    """Counts a connection that is cut because its server sends without end."""
    if (pending := current_request.get()) is not None:
        pending.cuts[reason] += 1


@contextmanager
def credentials_awaited() -> Iterator[None]:
    """A block in which the present request waits for credentials, for which its server is not to blame."""
    if (pending := current_request.get()) is None:
        yield
        return
    pending.credentials_wanted_at = monotonic()
    try:
        yield
    finally:
        pending.credentials_s = pending.credentials_wait_s(monotonic())
        pending.credentials_wanted_at = None


@dataclass(slots=True)
class CloseReason:
    """Why a connection was closed."""

    reason: str
    remedy: str = ""
    try_other_transport: bool = False
    """The server answers, but not over this transport."""
    notes: tuple[str, ...] = field(default=())
    policy_doing: str = ""
    """How what runs in its sandbox ended the server, as text for the policy; empty if nothing there did."""

    def __str__(self) -> str:
        return "; ".join((self.reason, *self.notes))


AUTH_REMEDY = "set `auth_token`, or `headers`, of this server"
SDK_CLOSED_MESSAGE = "Connection closed"
"""The SDK's error message for requests under way when the streams end."""


def to_upstream_error(error: MCPError, pending: PendingRequest, close_reason: CloseReason | None) -> UpstreamError:
    """Converts the dispatcher's error for a request into one with an outcome."""
    code = error.code
    if pending.http_status in (401, 403):
        refusal = close_reason_of_refusal(pending)
        return UpstreamError(Outcome.UNAVAILABLE, f"{refusal.reason}: {refusal.remedy}", code=code)
    if pending.session_lost:
        reason = f"the server no longer knows this session (HTTP {pending.http_status})"
        return UpstreamError(Outcome.UNAVAILABLE, reason, code=code)
    if pending.undelivered_reason:
        return UpstreamError(Outcome.UNAVAILABLE, pending.undelivered_reason, code=code)
    if pending.lost_reason:
        return UpstreamError(Outcome.UNKNOWN, pending.lost_reason, code=code)
    if code == CONNECTION_CLOSED and error.message == SDK_CLOSED_MESSAGE:
        if close_reason is not None and close_reason.policy_doing:
            return ended_by_policy(close_reason)
        outcome = Outcome.UNKNOWN if pending.sent else Outcome.UNAVAILABLE
        return UpstreamError(outcome, str(close_reason) if close_reason else error.message, code=code)
    return UpstreamError(Outcome.ERROR, error.message, code=code, data=error.error.data)


def ended_by_policy(close_reason: CloseReason) -> UpstreamError:
    """The error of calls of a server in a sandbox that was ended by what runs there."""
    reason = f"the sandbox was ended: {close_reason.policy_doing}: {close_reason}"
    text = f"The server of this tool was ended: {close_reason.policy_doing}. It does not come back."
    return UpstreamError(Outcome.ERROR, reason, policy_text=text)


def close_reason_of_refusal(pending: PendingRequest) -> CloseReason:
    """The reason and the remedy for HTTP 401 and 403."""
    challenge = f" (it asks for: {pending.auth_challenge[:200]})" if pending.auth_challenge else ""
    reason = f"the server rejects our credentials with HTTP {pending.http_status}{challenge}"
    return CloseReason(pending.auth_reason or reason, pending.auth_remedy or AUTH_REMEDY)
