"""Every answer is JSON with a status, and every refusal has one shape that says how to mend it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from starlette.types import Receive, Scope, Send

from gateway.wire import dumps

Headers = tuple[tuple[bytes, bytes], ...]
Kind = Literal[
    "invalid_request",
    "unauthorized",
    "forbidden",
    "not_found",
    "method_not_allowed",
    "conflict",
    "not_recorded",
    "too_large",
    "too_many_sessions",
    "unavailable",
    "internal",
]


class Reply:
    """A whole answer, as an ASGI application."""

    __slots__ = ("body", "headers", "kind", "status")

    def __init__(
        self, body: bytes, status: int = 200, kind: bytes = b"application/json", headers: Headers = ()
    ) -> None:
        self.body, self.status, self.kind, self.headers = body, status, kind, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = (
            (b"content-type", self.kind),
            (b"content-length", b"%d" % len(self.body)),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            *self.headers,
        )
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(dumps(value), status)


class Problem(Exception):
    """A request that is refused: what is wrong, where, and what to do about it."""

    def __init__(
        self, status: int, kind: Kind, message: str, *, remedy: str = "", param: str = "", headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        told = {"type": kind, "message": message, "remedy": remedy, "param": param}
        self.error: Mapping[str, str] = {name: text for name, text in told.items() if text}

    @property
    def reply(self) -> Reply:
        return Reply(dumps({"error": dict(self.error)}), self.status, headers=self.headers)


def no_session() -> Problem:
    """The same words for a session that is gone and one that never was, so that ids cannot be guessed at."""
    return Problem(404, "not_found", "There is no such session.", remedy="Open one with POST /v1/sessions.", param="id")


def not_found(path: str) -> Problem:
    return Problem(404, "not_found", f"There is nothing at {path[:200]}.", remedy="See /docs for what there is.")
