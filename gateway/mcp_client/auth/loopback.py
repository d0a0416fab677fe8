"""The address on this machine that a browser returns to after a login. It accepts one answer, to our request only."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from html import escape
from urllib.parse import parse_qs, urlsplit

import anyio
from anyio.abc import SocketAttribute, SocketStream

from gateway.mcp_client.auth.credentials import AuthError

_MAX_HEAD_BYTES = 16 * 1024
_HEAD_S = 10.0
_DEFAULT_PATH = "/callback"
_PAGE = "<!doctype html><meta charset=utf-8><title>mtrl-gateway</title><p>{}</p>"


@dataclass
class LoopbackReceiver:
    """Waits for the authorization server's answer to the login with this `state`."""

    redirect_uri: str
    state: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    _answer: dict[str, str] = field(default_factory=dict)
    _answered: anyio.Event = field(default_factory=anyio.Event)

    async def wait(self) -> dict[str, str]:
        """The parameters of the answer."""
        await self._answered.wait()
        return self._answer

    async def serve(self, stream: SocketStream) -> None:
        """Answers one connection of the browser. Others may connect to this port as well, and are refused."""
        async with stream:
            with anyio.move_on_after(_HEAD_S):
                try:
                    status, text = self._handle(await _read_head(stream))
                    page = _PAGE.format(escape(text)).encode()
                    head = f"HTTP/1.1 {status}\r\ncontent-type: text/html\r\ncontent-length: {len(page)}\r\n"
                    await stream.send(f"{head}cache-control: no-store\r\nconnection: close\r\n\r\n".encode() + page)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError):
                    return

    def _handle(self, head: bytes) -> tuple[str, str]:
        """The status and the page for a request."""
        method, _, rest = head.decode("latin-1").partition(" ")
        target = urlsplit(rest.partition(" ")[0])
        if method != "GET" or target.path != urlsplit(self.redirect_uri).path:
            return "404 Not Found", "There is nothing here."
        try:
            fields = parse_qs(target.query, max_num_fields=50)
        except ValueError:
            fields = {}
        answer = {key: values[0] for key, values in fields.items() if len(values) == 1}
        if not secrets.compare_digest(answer.get("state", "").encode(), self.state.encode()):
            return "400 Bad Request", "This answer belongs to no login that is under way."
        if not self._answered.is_set():
            self._answer = answer
            self._answered.set()
        return "200 OK", "mtrl-gateway has the answer. You can close this window, and read the rest in the terminal."


async def _read_head(stream: SocketStream) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD_BYTES:
        head += await stream.receive()
    return head


@asynccontextmanager
async def open_loopback(redirect_uri: str | None, preferred_port: int) -> AsyncIterator[LoopbackReceiver]:
    """Listens at the redirect URI, or at 127.0.0.1 with the preferred port if it is free, else with any."""
    parts = urlsplit(redirect_uri or f"http://127.0.0.1:{preferred_port}{_DEFAULT_PATH}")
    host, port = parts.hostname or "127.0.0.1", parts.port or 0
    try:
        listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    except OSError as error:
        if redirect_uri is not None:
            reason = f"nothing can listen at {redirect_uri}: {error.strerror}"
            raise AuthError(reason, "end what uses that port, or register another `oauth.redirect_uri`") from None
        listener = await anyio.create_tcp_listener(local_host=host)
    async with listener:
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 (of a socket, not of a database)
        receiver = LoopbackReceiver(redirect_uri or f"http://{host}:{port}{_DEFAULT_PATH}")
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        tasks.start_soon(listener.serve, receiver.serve)
        try:
            yield receiver
        finally:
            tasks.cancel_scope.cancel()
            # The block's error is not passed on: the task group would wrap it into an exception group.
            await tasks.__aexit__(None, None, None)
