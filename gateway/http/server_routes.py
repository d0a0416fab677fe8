"""Routes under /v1/servers: the details of one MCP server with the tail of its log, and its restart."""

from __future__ import annotations

import time
from typing import Any

import anyio
from starlette.types import ASGIApp

from gateway.http.exchange import Problem, Request, json_response
from gateway.http.served_gateway import RestartableServer, ServerStatus, find_server
from gateway.http.state import AppState


async def get_server(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/servers/{id}."""
    return json_response(_details_to_json(_find_server(app, request)))


async def restart_server(app: AppState, request: Request) -> ASGIApp:
    """POST /v1/servers/{id}/restart: begins a restart, which the state then follows."""
    server = _find_server(app, request)
    server.restart()
    return json_response(_details_to_json(server), 202)


def _find_server(app: AppState, request: Request) -> RestartableServer:
    name = request.path_params["id"]
    server = find_server(app.gateway, name)
    if server is None:
        remedy = "GET /healthz names the servers."
        raise Problem(404, "not_found", f"There is no server {name[:200]!r}.", remedy=remedy, param="id")
    return server


def status_to_json(status: ServerStatus) -> dict[str, Any]:
    """A server's state, as GET /healthz gives it."""
    return {
        "state": status.state,
        "reason": status.reason,
        "remedy": status.remedy,
        "tools": status.tools,
        "transport": getattr(status, "transport", ""),
        "protocol": getattr(status, "protocol_version", ""),
        "reconnects": getattr(status, "reconnects", 0),
        "cut": sum(getattr(status, "cuts", {}).values()),
        "last_loss": getattr(status, "last_loss", ""),
        "quarantined": dict(status.quarantined),
    }


def _details_to_json(server: RestartableServer) -> dict[str, Any]:
    status = server.status
    since = getattr(status, "since", 0.0)
    return {
        "name": server.name,
        **status_to_json(status),
        "state_since": time.time() - (anyio.current_time() - since),
        "processes": list(getattr(status, "children", ())),
        "cuts": dict(getattr(status, "cuts", {})),
        "log": server.log.text,
    }
