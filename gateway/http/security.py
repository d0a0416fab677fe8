"""Middleware that checks every request before routing: token, Host, Origin, and the type and size of the body.

The Host check prevents DNS rebinding, by which a web page makes a browser send requests here under the page's own host
name. The Origin check keeps out pages of other servers, those of other local ports included, and a body must be
declared as JSON, which no page can do without asking first. The token is compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.exchange import Problem
from gateway.http.settings import Settings, is_loopback

PUBLIC_PATHS = frozenset({"/", "/healthz", "/readyz", "/openapi.json", "/ui"})
"""Paths that reveal nothing about the tools, so that probes and browsers need no token for them."""
PUBLIC_PREFIX = "/ui/"
SINGLE_HEADERS = (b"host", b"origin", b"authorization", b"content-type", b"content-length", b"transfer-encoding")
"""Headers that a request has at most once: of two, a proxy in front and this server could read different ones."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_JSON = b"application/json"


class SecurityMiddleware:
    """Refuses requests that are not allowed; sets `scope["trusted"]` for those with a valid token."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        token = settings.token
        self._token = None if token is None else token.get_secret_value().encode()
        self._allowed_hosts = frozenset(name.lower() for name in (settings.host, *settings.allow_hosts))
        self._allowed_origins = frozenset(origin.lower() for origin in settings.allow_origins)
        self._named_hosts = frozenset(name.lower() for name in settings.allow_hosts)
        self._max_body_bytes = settings.body_bytes
        self._is_known_host = lru_cache(maxsize=256)(self._is_allowed_host)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self.app(scope, receive, send)
        if scope["type"] != "http":
            return send({"type": "websocket.close", "code": 1008})
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scope["trusted"] = self._has_valid_token(headers)
        problem = self._find_problem(scope, headers)
        if problem is not None:
            return problem.response(scope, receive, send)
        if b"transfer-encoding" in headers:
            return self._limit_chunked_body(scope, receive, send)
        return self.app(scope, receive, send)

    def _has_valid_token(self, headers: dict[bytes, bytes]) -> bool:
        """Whether the request has the token; true for every request if the gateway needs none."""
        if self._token is None:
            return True
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"

    def _find_problem(self, scope: Scope, headers: dict[bytes, bytes]) -> Problem | None:
        repeated = None if len(headers) == len(scope["headers"]) else _find_repeated(scope["headers"])
        if repeated is not None:
            return Problem(400, "invalid_request", f"The request has more than one {repeated} header.")
        if not scope["trusted"] and not _is_public(scope["path"]):
            remedy, challenge = "Send the token as `Authorization: Bearer ...`.", ((b"www-authenticate", b"Bearer"),)
            return Problem(401, "unauthorized", "The token is missing or wrong.", remedy=remedy, headers=challenge)
        if not self._is_known_host(headers.get(b"host", b"")):
            remedy = "Use the server's own address, or start it with a token (`--token-file`)."
            return Problem(403, "forbidden", "This Host is not served here.", remedy=remedy)
        if not self._is_allowed_page(scope, headers):
            remedy = "Open the page from this server, or name its origin (`--allow-origin`)."
            return Problem(403, "forbidden", "Web pages of this Origin may not call this server.", remedy=remedy)
        return self._find_body_problem(headers)

    def _find_body_problem(self, headers: dict[bytes, bytes]) -> Problem | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return _body_too_large(self._max_body_bytes)
        content_type = headers.get(b"content-type", b"")
        if content_type == _JSON or content_type.partition(b";")[0].strip().lower() == _JSON:
            return None
        if b"transfer-encoding" not in headers and int(length) == 0:
            return None
        remedy = "Send `Content-Type: application/json`."
        return Problem(415, "invalid_request", "The body is not declared as JSON.", remedy=remedy)

    def _is_allowed_host(self, authority: bytes) -> bool:
        """Any Host is allowed with a token, because a web page cannot know the token."""
        host = _host_of(b"//" + authority)
        return self._token is not None or is_loopback(host) or host in self._allowed_hosts

    def _is_allowed_page(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        """Whether the request comes from no web page, from one of ours, or from one of a named origin."""
        origin = headers.get(b"origin")
        if origin is not None:
            return self._is_allowed_origin(origin, headers.get(b"host", b""))
        # Browsers send no Origin with images, scripts and the like; links from other pages may lead here.
        is_foreign = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        return not is_foreign or _is_public(scope["path"]) or headers.get(b"sec-fetch-mode") == b"navigate"

    def _is_allowed_origin(self, origin: bytes, host: bytes) -> bool:
        """Our own origin is the one whose host and port are those of the request's Host."""
        text = origin.decode("latin-1").lower()
        if text in self._allowed_origins:
            return True
        scheme, _, authority = text.partition("://")
        default_port = _DEFAULT_PORTS.get(scheme)
        if default_port is None:
            return False
        name, port = _address_of(authority, default_port)
        own_name, own_port = _address_of(host.decode("latin-1").lower(), default_port)
        return bool(name) and (
            (name, port) == (own_name, own_port) or (name in self._named_hosts and port in (default_port, own_port))
        )

    async def _limit_chunked_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measures a body without a declared length while it arrives."""
        size = 0
        responded = False

        async def measured_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise _body_too_large(self._max_body_bytes)
            return message

        async def noting_send(message: Message) -> None:
            nonlocal responded
            responded = True
            await send(message)

        try:
            await self.app(scope, measured_receive, noting_send)
        except Exception:  # boundary: a mounted application may wrap the refusal in errors of its own
            if size <= self._max_body_bytes or responded:
                raise
            await _body_too_large(self._max_body_bytes).response(scope, receive, send)


def _is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX)


def _find_repeated(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The name of a header that occurs twice and must not."""
    names = [name for name, _ in headers if name in SINGLE_HEADERS]
    return next((name.decode() for name in names if names.count(name) > 1), None)


def _address_of(authority: str, default_port: int) -> tuple[str, int]:
    """Host name and port of `host[:port]`; an empty name if it is anything else."""
    try:
        parts = urlsplit(f"//{authority}")
        is_plain = parts.netloc == authority and parts.username is None
        return (parts.hostname or "" if is_plain else "", parts.port or default_port)
    except ValueError:
        return "", 0


def _host_of(url: bytes) -> str:
    """The host name in a Host header, without the port; empty if there is none."""
    try:
        return urlsplit(url.decode("ascii")).hostname or ""
    except ValueError:
        return ""


def _body_too_large(limit: int) -> Problem:
    """The 413 response, which also closes the connection, because the rest of the body is not read."""
    remedy = "Send less at once, or raise the limit (`body_bytes`)."
    close = ((b"connection", b"close"),)
    message = f"The body is larger than the limit of {limit} bytes."
    return Problem(413, "too_large", message, remedy=remedy, headers=close)
