"""The gateway's ASGI application: the table of operations, mounted applications and the security middleware."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from starlette.types import ASGIApp

from gateway.gateway import Gateway
from gateway.http import activity_routes, api_models, info_routes, session_routes
from gateway.http.endpoint import DisconnectWatcher, Endpoint, Handler, Router
from gateway.http.exchange import Request, Response
from gateway.http.openapi import STREAM, Operation, openapi_document
from gateway.http.security import SecurityMiddleware
from gateway.http.settings import Settings
from gateway.http.state import AppState
from gateway.wire import dumps

_BODY_ERRORS = (413, 415, 422)
_FILES = "text/javascript, text/css, text/html, image/svg+xml"


async def get_openapi(app: AppState, request: Request) -> ASGIApp:
    """GET /openapi.json."""
    return Response(_openapi_json())


@cache
def _openapi_json() -> bytes:
    return dumps(openapi_document(OPERATIONS))


OPERATIONS = (
    Operation(
        "POST",
        "/v1/sessions/{id}/calls",
        session_routes.call_tools,
        "Run the tool calls of an assistant message",
        api_models.CallsResponse,
        api_models.CallsRequest,
        errors=(*_BODY_ERRORS, 404, 409),
    ),
    Operation(
        "POST",
        "/v1/sessions/{id}/feedback",
        session_routes.get_feedback,
        "Get the next turn of the session's interaction",
        api_models.FeedbackResponse,
        api_models.FeedbackRequest,
        errors=(*_BODY_ERRORS, 404, 409),
    ),
    Operation(
        "POST",
        "/v1/sessions",
        session_routes.open_session,
        "Open a session for one rollout",
        api_models.SessionResponse,
        api_models.SessionRequest,
        status=201,
        errors=(*_BODY_ERRORS, 409, 503),
        query={"hold": ("false", "true")},
    ),
    Operation(
        "GET",
        "/v1/sessions/{id}",
        session_routes.get_session,
        "Get the state of a session",
        api_models.SessionState,
        errors=(404,),
    ),
    Operation(
        "DELETE",
        "/v1/sessions/{id}",
        session_routes.close_session,
        "Close a session and release its resources; an `abandoned` one is not graded",
        api_models.ClosedSession,
        errors=(404, 422, 503),
        query={"abandoned": ("false", "true")},
    ),
    Operation(
        "POST",
        "/v1/calls",
        session_routes.call_pure_tools,
        "Run calls of pure tools without a session",
        api_models.CallsResponse,
        api_models.CallsRequest,
        errors=(*_BODY_ERRORS, 409, 503),
    ),
    Operation(
        "GET",
        "/v1/tools",
        info_routes.list_tools,
        "List the tools as function schemas",
        api_models.Tools,
        errors=(422,),
        query={"strict": ("false", "true"), "audience": ("policy", "loop", "all"), "form": ("openai", "spec")},
    ),
    Operation(
        "GET", "/v1/live/calls", activity_routes.stream_calls, "Stream recent, running and finished calls", STREAM
    ),
    Operation(
        "GET",
        "/v1/servers/{id}",
        info_routes.get_server,
        "Get the state and the log of a server",
        api_models.ServerDetails,
        errors=(404,),
    ),
    Operation(
        "POST",
        "/v1/servers/{id}/restart",
        info_routes.restart_server,
        "Restart a server, or connect to it again",
        api_models.ServerDetails,
        status=202,
        errors=(404,),
    ),
    Operation("GET", "/healthz", info_routes.get_health, "Health of the gateway and its servers", api_models.Health),
    Operation(
        "GET",
        "/readyz",
        info_routes.get_readiness,
        "Whether tools can be called",
        api_models.Readiness,
        errors=(503,),
    ),
    Operation("GET", "/metrics", info_routes.get_metrics, "Prometheus metrics", "text/plain"),
    Operation("GET", "/openapi.json", get_openapi, "This document", "application/json"),
    Operation("GET", "/ui", info_routes.get_ui_page, "The web UI", "text/html"),
    Operation("GET", "/ui/{id}", info_routes.get_ui_file, "A file of the web UI", _FILES, errors=(404,)),
)
"""What the API can do. Of the paths with an id in them, the busiest come first, because they are tried in order."""


def build_app(
    gateway: Gateway,
    settings: Settings,
    disconnects: DisconnectWatcher,
    mounts: Mapping[str, ASGIApp] | None = None,
) -> ASGIApp:
    """Builds the application over an entered gateway and a running disconnect watcher."""
    app = AppState(gateway, settings, disconnects)
    handlers: dict[str, dict[str, Handler]] = {}
    for operation in OPERATIONS:
        handlers.setdefault(operation.path, {})[operation.method] = partial(operation.handler, app)
    endpoints: dict[str, ASGIApp] = {path: Endpoint(by_method) for path, by_method in handlers.items()}
    return SecurityMiddleware(Router(endpoints | dict(mounts or {})), settings)
