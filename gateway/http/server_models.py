"""Pydantic models of the responses about servers and health."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gateway.http.api_models import Count, StrictModel


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
    limits_hit: dict[str, Count]
    """By limit: memory, processes, output, time."""


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
