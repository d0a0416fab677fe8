"""Routes about the gateway itself: the tool list, its servers, health, metrics and the web UI.

The web UI's files contain no data, so they need no token, and they load nothing from other hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import anyio
from starlette.types import ASGIApp

from gateway.http.exchange import Problem, Request, Response, built_response, json_response, not_found
from gateway.http.session_routes import MAX_QUICK_TOOLS, are_large, specs_to_json
from gateway.http.state import AppState
from gateway.large_json import run_beside
from gateway.mcp_client.mcp_toolset import McpToolset, mcp_servers
from gateway.mcp_client.server_status import ServerStatus
from gateway.sandbox.sandbox_statistics import STATISTICS
from gateway.web.static_files import SHARED_PACKAGE, find_file

MAX_REFUSAL_CHARS = 16_384
"""How much is given of the errors in refused files."""


async def list_tools(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/tools."""
    strict = request.query_choice("strict", ("false", "true")) == "true"
    audience = request.query_choice("audience", ("policy", "loop", "all"))
    form = request.query_choice("form", ("openai", "spec"))
    await app.gateway.start.settle()
    specs = [spec for spec in app.gateway.specs if audience in (spec.audience, "all")]

    def build() -> dict[str, Any]:
        return {"object": "list", "data": specs_to_json(specs, form, strict=strict)}

    return await built_response(build, is_large=are_large(specs))


async def get_health(app: AppState, request: Request) -> ASGIApp:
    """GET /healthz: always 200, because an MCP server that is down costs only its own tools.

    Without a valid token, the response contains only the status.
    """
    servers = {
        status.name: status_to_json(status) for status in (server.status for server in mcp_servers(app.gateway.sources))
    }
    value: dict[str, Any] = {"status": _summarize(server["state"] for server in servers.values())}
    if request.scope.get("trusted"):
        table, refusal = app.gateway.table, app.gateway.reload_refusal
        value |= {
            "sessions": len(app.gateway.sessions),
            "tools": len(table.specs),
            "servers": servers,
            "set_aside": dict(table.set_aside),
            "clashes": dict(table.clashes),
            "starting": app.gateway.start.names,
            "sandboxes": STATISTICS.to_dict(),
            "reload_refusal": refusal and {"error": refusal.error[:MAX_REFUSAL_CHARS], "at": refusal.at},
        }
    count = sum(len(server["quarantined"]) for server in servers.values()) + len(value.get("set_aside", ()))
    return await built_response(lambda: value, is_large=count > MAX_QUICK_TOOLS)


async def get_readiness(app: AppState, request: Request) -> ASGIApp:
    """GET /readyz: 503 while servers start for the first time, and while no tool at all can be called."""
    states = [server.status.state for server in mcp_servers(app.gateway.sources)]
    if app.gateway.start.names:
        raise Problem(503, "unavailable", "Servers are starting.", remedy="GET /healthz names them.")
    if any(state == "up" for state in states) or any(tool.source.trusted for tool in app.gateway.table.tools.values()):
        return json_response({"status": _summarize(states)})
    raise Problem(503, "unavailable", "No tool can be called.", remedy="GET /healthz says why each server is down.")


def _summarize(states: Iterable[str]) -> str:
    return "ok" if all(state == "up" for state in states) else "degraded"


async def get_server(app: AppState, request: Request) -> ASGIApp:
    """GET /v1/servers/{id}."""
    return json_response(_details_to_json(_find_server(app, request)))


async def restart_server(app: AppState, request: Request) -> ASGIApp:
    """POST /v1/servers/{id}/restart: begins a restart, which the state then follows."""
    server = _find_server(app, request)
    server.restart()
    return json_response(_details_to_json(server), 202)


def _find_server(app: AppState, request: Request) -> McpToolset:
    name = request.path_params["id"]
    server = next((one for one in mcp_servers(app.gateway.sources) if one.name == name), None)
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
        "transport": status.transport,
        "protocol": status.protocol_version,
        "reconnects": status.reconnects,
        "cut": sum(status.cuts.values()),
        "last_loss": status.last_loss,
        "quarantined": dict(status.quarantined),
    }


def _details_to_json(server: McpToolset) -> dict[str, Any]:
    status = server.status
    return {
        "name": server.name,
        **status_to_json(status),
        "state_since": time.time() - (anyio.current_time() - status.since),
        "processes": list(status.children),
        "cuts": dict(status.cuts),
        "log": server.log.text,
    }


async def get_metrics(app: AppState, request: Request) -> ASGIApp:
    """GET /metrics, in the Prometheus text format."""
    text = await run_beside(lambda: app.metrics.text)
    return Response(text, content_type=b"text/plain; version=0.0.4; charset=utf-8")


UI_PAGE = "gateway.html"


async def get_ui_page(app: AppState, request: Request) -> ASGIApp:
    """GET /ui."""
    return find_file(UI_PAGE, SHARED_PACKAGE) or not_found("/ui").response


async def get_ui_file(app: AppState, request: Request) -> ASGIApp:
    """GET /ui/{id}: a script, style sheet or image of the web UI."""
    name = request.path_params["id"]
    file = find_file(name, SHARED_PACKAGE)
    if file is None:
        raise not_found(f"/ui/{name}")
    return file
