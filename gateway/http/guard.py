"""Before anything else: is the caller who they must be, do they mean us, and do they bring no more than they may?

A page in a browser can make it send requests here under a name of its own (DNS rebinding), so the Host that a caller
names must be ours, and so must the Origin where there is one. A token is compared in constant time.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.reply import Problem
from gateway.http.settings import Settings, is_loopback

OPEN_PATHS = frozenset({"/", "/healthz", "/docs", "/openapi.json", "/ui"})
"""These tell nothing of the tools, so that a probe and a browser need no token."""
OPEN_FOLDER = "/ui/"


class Guard:
    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        token = settings.token
        self._token = None if token is None else token.get_secret_value().encode()
        self._names = frozenset(name.lower() for name in (settings.host, *settings.allow_hosts))
        self._most = settings.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scope["trusted"] = self._knows_token(headers)
        problem = self._problem(scope, headers)
        if problem is not None:
            return await problem.reply(scope, receive, send)
        if b"transfer-encoding" in headers:
            return await self._measured(scope, receive, send)
        return await self.app(scope, receive, send)

    def _knows_token(self, headers: dict[bytes, bytes]) -> bool:
        """Everyone does where there is none."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return self._token is None or (hmac.compare_digest(given.strip(), self._token) and scheme.lower() == b"bearer")

    def _problem(self, scope: Scope, headers: dict[bytes, bytes]) -> Problem | None:
        if not scope["trusted"] and scope["path"] not in OPEN_PATHS and not scope["path"].startswith(OPEN_FOLDER):
            return _unauthorized()
        host = _name(b"//" + headers.get(b"host", b""))
        if not self._is_ours(host):
            remedy = "Call by the server's own address, or start it with a token (`--token-file`)."
            return Problem(403, "forbidden", "This Host is not served here.", remedy=remedy)
        origin = headers.get(b"origin")
        if origin is not None and not self._may_come_from(_name(origin), host):
            return Problem(403, "forbidden", "Pages of this Origin may not call here.")
        length = headers.get(b"content-length", b"0")
        return _too_large(self._most) if not length.isdigit() or int(length) > self._most else None

    def _is_ours(self, host: str) -> bool:
        """A caller with the token has proved more than a name could; a browser's page does not know it."""
        return self._token is not None or is_loopback(host) or host in self._names

    def _may_come_from(self, origin: str, host: str) -> bool:
        return bool(origin) and (origin == host or origin in self._names or (is_loopback(origin) and is_loopback(host)))

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For a body that does not say its length: it is weighed while it comes."""
        weight = 0
        answered = False

        async def weighed() -> Message:
            nonlocal weight
            message = await receive()
            weight += len(message.get("body", b""))
            if weight > self._most:
                raise _too_large(self._most)
            return message

        async def sent(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self.app(scope, weighed, sent)
        except Exception:  # boundary: a mounted application may wrap the refusal in errors of its own
            if weight <= self._most or answered:
                raise
            await _too_large(self._most).reply(scope, receive, send)


def _name(url: bytes) -> str:
    """The host of an origin or of a Host header, without its port; empty where it is not one."""
    try:
        return urlsplit(url.decode("ascii")).hostname or ""
    except ValueError:
        return ""


def _unauthorized() -> Problem:
    remedy = "Send the token as `Authorization: Bearer ...`."
    challenge = ((b"www-authenticate", b"Bearer"),)
    return Problem(401, "unauthorized", "The token is missing or wrong.", remedy=remedy, headers=challenge)


def _too_large(most: int) -> Problem:
    """The connection ends with it: the rest of the body is not wanted."""
    remedy = "Send less at once, or raise the limit (`body_bytes`)."
    close = ((b"connection", b"close"),)
    return Problem(413, "too_large", f"A body may have {most} bytes.", remedy=remedy, headers=close)
