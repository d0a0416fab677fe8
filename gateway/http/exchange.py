"""Requests and responses of the HTTP API: parsing, JSON responses, and the one error format (`Problem`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, cast
from urllib.parse import parse_qs

from anyio import to_thread
from anyio.lowlevel import checkpoint
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from gateway.bounded_json import SMALL_LENGTH, JsonDepthError, JsonLimitError, loads
from gateway.large_json import run_beside
from gateway.wire import dumps, dumps_large

Headers = tuple[tuple[bytes, bytes], ...]
PIECE_BYTES = 262_144
"""A larger body is sent in several pieces, between which other requests are served."""
ErrorType = Literal[
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


_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))


class Response:
    """A complete response, as an ASGI application."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        body: bytes,
        status: int = 200,
        content_type: bytes = b"application/json",
        headers: Headers = (),
    ) -> None:
        self.body, self.status, self.content_type, self.headers = body, status, content_type, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PIECE_BYTES and not self.headers:
            respond = getattr(getattr(send, "__self__", None), "respond", None)  # that of our HTTP protocol
            if respond is not None and respond(self.status, _encode_head(self.content_type), self.body):
                return
        headers = (
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            *_HEADERS,
            *self.headers,
        )
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        last = max(0, len(self.body) - 1) // PIECE_BYTES * PIECE_BYTES
        for start in range(0, last, PIECE_BYTES):
            piece = self.body[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await checkpoint()
        await send({"type": "http.response.body", "body": self.body[last:]})


@cache
def _encode_head(content_type: bytes) -> bytes:
    """The headers of every response as they are written, except for its length."""
    return b"".join(b"%b: %b\r\n" % header for header in ((b"content-type", content_type), *_HEADERS))


def json_response(value: Any, status: int = 200) -> Response:
    """A response with `value` as JSON."""
    return Response(dumps(value), status)


async def built_response(build: Callable[[], Any], status: int = 200, *, is_large: bool) -> Response:
    """A response with what `build` returns as JSON; if that is large, it is built and encoded beside the event loop."""
    if not is_large:
        return json_response(build(), status)
    return Response(await run_beside(lambda: dumps_large(build())), status)


class Problem(Exception):
    """An error response: what is wrong, in which parameter, and how to fix it."""

    def __init__(
        self, status: int, kind: ErrorType, message: str, *, remedy: str = "", param: str = "", headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        fields = {"type": kind, "message": message, "remedy": remedy, "param": param}
        self.error: Mapping[str, str] = {name: text for name, text in fields.items() if text}

    @property
    def response(self) -> Response:
        return Response(dumps({"error": dict(self.error)}), self.status, headers=self.headers)


def session_not_found() -> Problem:
    """The same 404 for a closed session and an unknown id, so that ids cannot be probed."""
    return Problem(404, "not_found", "There is no such session.", remedy="Open one with POST /v1/sessions.", param="id")


def not_found(path: str) -> Problem:
    """The 404 for an unknown path."""
    return Problem(404, "not_found", f"There is nothing at {path[:200]}.", remedy="See /openapi.json.")


M = TypeVar("M", bound=BaseModel)


class ClientDisconnected(Exception):
    """The client disconnected, so no response is sent."""


class Request:
    """An HTTP request, with its query and body parsed on demand."""

    __slots__ = ("receive", "scope")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope, self.receive = scope, receive

    @property
    def path_params(self) -> dict[str, str]:
        params: dict[str, str] = self.scope["path_params"]
        return params

    def query_choice(self, name: str, choices: tuple[str, ...]) -> str:
        """A query parameter that must be one of `choices`; the first is the default."""
        query: str = self.scope["query_string"].decode("latin-1")
        value = parse_qs(query, keep_blank_values=True).get(name, [choices[0]])[-1]
        if value not in choices:
            remedy = f"Use one of: {', '.join(choices)}."
            raise Problem(422, "invalid_request", f"{name} has an unknown value.", remedy=remedy, param=name)
        return value

    async def read_body(self) -> bytes:
        """The body. Large ones are checked beside the event loop first, since parsing holds it."""
        if len(body := await self.receive_body()) > SMALL_LENGTH:
            try:
                await to_thread.run_sync(loads, body, abandon_on_cancel=True)
            except JsonLimitError as error:
                is_deep = isinstance(error, JsonDepthError)
                kind: ErrorType = "invalid_request" if is_deep else "too_large"
                raise Problem(
                    400 if is_deep else 413, kind, f"The body is too much: {error}.", remedy="Send less at once."
                ) from None
            except ValueError:
                return body  # its parsing says what is wrong
        return body

    async def receive_body(self) -> bytes:
        """The body, which nobody has checked."""
        message = await self.receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            body: bytes = message.get("body", b"")
            return body
        chunks = []
        while message["type"] == "http.request":
            chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(chunks)
            message = await self.receive()
        raise ClientDisconnected

    async def read_model(self, model: type[M]) -> M:
        return parse_body(model, await self.read_body())


def parse_body(model: type[M], body: bytes) -> M:
    """Validates a JSON body; raises a `Problem` with its first error."""
    try:
        return cast(M, model.__pydantic_validator__.validate_json(body))  # the method passes eight options on
    except ValidationError as error:
        raise _validation_problem(error) from None


def _validation_problem(error: ValidationError) -> Problem:
    """The first validation error, without the value: a body may hold secrets, and clients log responses."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return Problem(400, "invalid_request", first["msg"], remedy="Send one JSON object, in UTF-8.")
    where = ".".join(str(step) for step in first["loc"])
    remedy = "See /openapi.json for the fields."
    return Problem(422, "invalid_request", first["msg"], remedy=remedy, param=where)
