"""How the gateway is: in a word for whoever probes it, in full for whoever may know."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp

from gateway.http.asked import Asked
from gateway.http.desk import Desk
from gateway.http.reply import Reply, json_reply
from gateway.http.servers import ServerState, states


async def health(desk: Desk, asked: Asked) -> ASGIApp:
    """Always 200 while we serve: a server that is down costs only its own tools."""
    servers = {state.name: _state(state) for state in states(desk.gateway)}
    well = all(server["state"] == "up" for server in servers.values())
    value: dict[str, Any] = {"status": "ok" if well else "degraded"}
    if asked.scope.get("trusted"):
        table = desk.gateway.table
        value |= {
            "sessions": len(desk.gateway.sessions),
            "tools": len(table.specs),
            "servers": servers,
            "set_aside": dict(table.set_aside),
        }
    return json_reply(value)


def _state(state: ServerState) -> dict[str, Any]:
    return {
        "state": state.state,
        "reason": state.reason,
        "remedy": state.remedy,
        "tools": state.tools,
        "transport": getattr(state, "transport", ""),
        "protocol": getattr(state, "protocol_version", ""),
        "reconnects": getattr(state, "reconnects", 0),
        "quarantined": dict(state.quarantined),
    }


async def metrics(desk: Desk, asked: Asked) -> ASGIApp:
    return Reply(desk.metrics.text, kind=b"text/plain; version=0.0.4; charset=utf-8")
