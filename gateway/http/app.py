"""The rooms of the gateway's house: every path has one, and behind the guard nothing else is asked of a caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http import calls, live, page, sessions, tapes
from gateway.http.asked import Asked
from gateway.http.desk import Desk
from gateway.http.docs import docs, openapi
from gateway.http.endpoint import Act, Endpoint, nowhere
from gateway.http.guard import Guard
from gateway.http.hosted import Hosted
from gateway.http.settings import Settings
from gateway.http.status import health, metrics
from gateway.http.tools import tools
from gateway.http.watch import Watch

Room = Callable[[Desk, Asked], Awaitable[ASGIApp]]


ROOMS: Mapping[str, Mapping[str, Room]] = {
    "/v1/sessions/{id}/calls": {"POST": calls.call},
    "/v1/sessions/{id}/feedback": {"POST": calls.feedback},
    "/v1/sessions/{id}": {"GET": sessions.look, "DELETE": sessions.close},
    "/v1/sessions": {"POST": sessions.begin},
    "/v1/calls": {"POST": calls.call_pure},
    "/v1/tools": {"GET": tools},
    "/v1/live/calls": {"GET": live.calls},
    "/v1/live/sessions": {"GET": live.sessions},
    "/v1/live/sessions/{id}": {"DELETE": live.close},
    "/v1/tapes": {"GET": tapes.shelf},
    "/v1/tapes/{id}": {"GET": tapes.tape},
    "/healthz": {"GET": health},
    "/metrics": {"GET": metrics},
    "/openapi.json": {"GET": openapi},
    "/docs": {"GET": docs},
    "/ui": {"GET": page.page},
    "/ui/{id}": {"GET": page.file},
}
"""The busiest first, since they are tried in order."""


class _Mounted:
    """An application of its own at one path: the router would take a bare function for a room."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def app(gateway: Hosted, settings: Settings, watch: Watch, mounts: Mapping[str, ASGIApp] | None = None) -> ASGIApp:
    """The ASGI application over a gateway that is entered already, and a watch that runs."""
    desk = Desk(gateway, settings, watch)
    routes = [Route(path, Endpoint(_acts(desk, rooms))) for path, rooms in ROOMS.items()]
    routes += [Route(path, _Mounted(mounted)) for path, mounted in (mounts or {}).items()]
    return Guard(Router(routes, redirect_slashes=False, default=nowhere), settings)


def _acts(desk: Desk, rooms: Mapping[str, Room]) -> dict[str, Act]:
    return {method: partial(room, desk) for method, room in rooms.items()}
