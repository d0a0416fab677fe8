"""The gateway's ASGI application: the route table, mounted applications and the security middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http import activity_routes, info_routes, server_routes, session_routes, tape_routes
from gateway.http.endpoint import DisconnectWatcher, Endpoint, Handler, not_found_app
from gateway.http.exchange import Request
from gateway.http.info_routes import get_docs, get_health, get_metrics, get_openapi, list_tools
from gateway.http.security import SecurityMiddleware
from gateway.http.served_gateway import ServedGateway
from gateway.http.settings import Settings
from gateway.http.state import AppState

RouteHandler = Callable[[AppState, Request], Awaitable[ASGIApp]]


ROUTES: Mapping[str, Mapping[str, RouteHandler]] = {
    "/v1/sessions/{id}/calls": {"POST": session_routes.call_tools},
    "/v1/sessions/{id}/feedback": {"POST": session_routes.get_feedback},
    "/v1/sessions/{id}": {"GET": session_routes.get_session, "DELETE": session_routes.close_session},
    "/v1/sessions": {"POST": session_routes.open_session},
    "/v1/calls": {"POST": session_routes.call_pure_tools},
    "/v1/tools": {"GET": list_tools},
    "/v1/live/calls": {"GET": activity_routes.stream_calls},
    "/v1/live/sessions": {"GET": activity_routes.list_sessions},
    "/v1/live/sessions/{id}": {"DELETE": activity_routes.close_session},
    "/v1/servers/{id}": {"GET": server_routes.get_server},
    "/v1/servers/{id}/restart": {"POST": server_routes.restart_server},
    "/v1/tapes": {"GET": tape_routes.list_tapes},
    "/v1/tapes/{id}": {"GET": tape_routes.read_tape},
    "/healthz": {"GET": get_health},
    "/metrics": {"GET": get_metrics},
    "/openapi.json": {"GET": get_openapi},
    "/docs": {"GET": get_docs},
    "/ui": {"GET": info_routes.get_ui_page},
    "/ui/{id}": {"GET": info_routes.get_ui_file},
}
"""The busiest paths first, because those with an id are tried in order."""


class PathTable:
    """The application of each path. A path has at most one `{id}`, which stands for one segment."""

    def __init__(self, apps: Mapping[str, ASGIApp]) -> None:
        self._exact = {path: app for path, app in apps.items() if "{id}" not in path}
        patterns = ((*path.partition("{id}")[::2], app) for path, app in apps.items() if "{id}" in path)
        self._patterns = tuple(patterns)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._find(scope) or not_found_app)(scope, receive, send)

    def _find(self, scope: Scope) -> ASGIApp | None:
        """The application of the request's path; its id and itself are noted in the scope."""
        path: str = scope["path"]
        app, id = self._exact.get(path), ""
        if app is None:
            for prefix, suffix, candidate in self._patterns:
                id = path[len(prefix) : len(path) - len(suffix)]
                if id and "/" not in id and path.startswith(prefix) and path.endswith(suffix):
                    app = candidate
                    break
            else:
                return None
        scope["path_params"], scope["endpoint"] = {"id": id}, app
        return app


def build_app(
    gateway: ServedGateway,
    settings: Settings,
    disconnects: DisconnectWatcher,
    mounts: Mapping[str, ASGIApp] | None = None,
) -> ASGIApp:
    """Builds the application over an entered gateway and a running disconnect watcher."""
    app = AppState(gateway, settings, disconnects)
    endpoints: dict[str, ASGIApp] = {path: Endpoint(_bind_handlers(app, handlers)) for path, handlers in ROUTES.items()}
    return SecurityMiddleware(PathTable(endpoints | dict(mounts or {})), settings)


def _bind_handlers(app: AppState, handlers: Mapping[str, RouteHandler]) -> dict[str, Handler]:
    return {method: partial(handler, app) for method, handler in handlers.items()}
