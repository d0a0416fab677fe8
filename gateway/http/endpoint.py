"""One boundary around every route: refusals become replies, and what nobody foresaw becomes a 500 without details."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ReplayError, SessionError, TooManySessions, Unavailable
from gateway.http.asked import Asked, Gone
from gateway.http.reply import Problem, not_found

log = logging.getLogger(__name__)

Act = Callable[[Asked], Awaitable[ASGIApp]]


class Endpoint:
    """An act for each method of one path."""

    def __init__(self, acts: Mapping[str, Act]) -> None:
        self.acts = acts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        act = self.acts.get(method)
        try:
            reply = await (_no_method(self.acts) if act is None else act(Asked(scope, receive)))
        except Gone:
            return
        except Problem as problem:
            reply = problem.reply
        except TooManySessions as error:
            headers = ((b"retry-after", b"1"),)
            reply = Problem(503, "too_many_sessions", str(error), headers=headers).reply
        except SessionError as error:
            reply = Problem(409, "conflict", str(error)).reply
        except ReplayError as error:
            reply = Problem(409, "not_recorded", str(error)).reply
        except Unavailable as error:
            reply = Problem(503, "unavailable", str(error)).reply
        except Exception:  # boundary: one request's misfortune is not the server's
            log.exception("%s failed", scope.get("path"))
            reply = Problem(500, "internal", "The gateway failed; its log says why.").reply
        await reply(scope, receive, send)


async def _no_method(acts: Mapping[str, Act]) -> ASGIApp:
    allowed = ", ".join(acts)
    headers = ((b"allow", allowed.encode()),)
    raise Problem(405, "method_not_allowed", "This path has no such method.", remedy=f"Use {allowed}.", headers=headers)


async def nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands where no route does."""
    if scope["type"] == "http":
        await not_found(scope["path"]).reply(scope, receive, send)
