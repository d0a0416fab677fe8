"""The endpoint of one path: dispatches by method, turns exceptions into error responses, cancels work on disconnect."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import anyio
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ReplayError, SessionError, TooManySessions, Unavailable
from gateway.http.exchange import ClientDisconnected, Problem, Request, not_found

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[ASGIApp]]


class Endpoint:
    """The ASGI application of one path, with a handler for each method."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self.handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        handler = self.handlers.get(method)
        try:
            response = await (_refuse_method(self.handlers) if handler is None else handler(Request(scope, receive)))
        except ClientDisconnected:
            return
        except Problem as problem:
            response = problem.response
        except TooManySessions as error:
            headers = ((b"retry-after", b"1"),)
            response = Problem(503, "too_many_sessions", str(error), headers=headers).response
        except SessionError as error:
            response = Problem(409, "conflict", str(error)).response
        except ReplayError as error:
            response = Problem(409, "not_recorded", str(error)).response
        except Unavailable as error:
            response = Problem(503, "unavailable", str(error)).response
        except Exception:  # boundary: an error in one request must not stop the server
            log.exception("%s failed", scope.get("path"))
            response = Problem(500, "internal", "The gateway failed; its log says why.").response
        await response(scope, receive, send)


async def _refuse_method(handlers: Mapping[str, Handler]) -> ASGIApp:
    allowed = ", ".join(handlers)
    headers = ((b"allow", allowed.encode()),)
    raise Problem(405, "method_not_allowed", "This path has no such method.", remedy=f"Use {allowed}.", headers=headers)


async def not_found_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers 404 for paths without a route."""
    if scope["type"] == "http":
        await not_found(scope["path"]).response(scope, receive, send)


class Router:
    """Sends each request to the application of its path, and names the path (`scope["route"]`).

    `{name}` in a path stands for one segment. Starlette's router tries one regular expression after another, eighteen
    before `/mcp`.
    """

    def __init__(self, apps: Mapping[str, ASGIApp], default: ASGIApp = not_found_app) -> None:
        self._apps, self._default = apps, default
        self._named = {_split_at_name(path): path for path in apps if "{" in path}
        """The paths with a name in them, by what is before it, the name, and what is after it."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path: str = scope["path"]
        params: dict[str, str] = {}
        if path not in self._apps or "{" in path:
            path, params = self._find(path)
        scope["path_params"], scope["route"] = params, path
        return self._apps.get(path, self._default)(scope, receive, send)

    def _find(self, path: str) -> tuple[str, dict[str, str]]:
        for (before, name, after), route in self._named.items():
            if path.startswith(before) and path.endswith(after):
                value = path[len(before) : len(path) - len(after)]
                if value and "/" not in value:
                    return route, {name: value}
        return "", {}


def _split_at_name(path: str) -> tuple[str, str, str]:
    before, _, rest = path.partition("{")
    name, _, after = rest.partition("}")
    return before, name, after


T = TypeVar("T")


async def has_left(receive: Receive) -> bool:
    """Whether the client of a request whose body was read has disconnected by now."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        return bool((await receive())["type"] == "http.disconnect")
    return False


GRACE_S = 0.2
"""Work that ends within this time is not watched for a disconnect: the extra task costs a tenth of a call and more.

With 64 calls of a stdio server at once each takes 50 ms and more, most of it waiting."""


class DisconnectWatcher:
    """Cancels long-running work when its client disconnects; `run` must be running as a task."""

    def __init__(self) -> None:
        self._new: set[_WatchedRequest] = set()
        self._waiting: set[_WatchedRequest] = set()
        self._has_new = anyio.Event()
        self.stopping = anyio.Event()
        """Set when the server stops; endless responses then end."""

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            while True:
                await self._has_new.wait()
                await anyio.sleep(GRACE_S)
                for request in self._waiting:
                    tasks.start_soon(request.watch, request.make_watch_scope())
                self._waiting, self._new = self._new, set()
                if not self._waiting:
                    self._has_new = anyio.Event()

    async def run_until_disconnect(self, receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
        """Awaits `work`; raises `ClientDisconnected` after cancelling it if the client disconnects first."""
        with anyio.CancelScope() as scope:
            return await self.cancel_on_disconnect(receive, scope.cancel, work)
        raise ClientDisconnected

    async def cancel_on_disconnect(
        self, receive: Receive, cancel: Callable[[], None], work: Callable[[], Awaitable[T]]
    ) -> T:
        """The same for work that `cancel` ends."""
        request = _WatchedRequest(receive, cancel)
        if not self._new:
            self._has_new.set()
        self._new.add(request)
        try:
            result = await work()
        finally:
            self._new.discard(request)
            self._waiting.discard(request)
            request.stop_watching()
        if request.has_left:
            raise ClientDisconnected
        return result


class _WatchedRequest:
    __slots__ = ("_cancel", "_receive", "_watch_scope", "has_left")

    def __init__(self, receive: Receive, cancel: Callable[[], None]) -> None:
        self._receive, self._cancel = receive, cancel
        self._watch_scope: anyio.CancelScope | None = None
        self.has_left = False
        """Whether the client has disconnected."""

    def make_watch_scope(self) -> anyio.CancelScope:
        """The scope of `watch`, made before that task starts, so that the work may end in between."""
        self._watch_scope = anyio.CancelScope()
        return self._watch_scope

    async def watch(self, scope: anyio.CancelScope) -> None:
        with scope:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.has_left = True
            self._cancel()

    def stop_watching(self) -> None:
        if self._watch_scope is not None:
            self._watch_scope.cancel()
