"""HTTP connections shared by all MCP servers, in a pool whose cost does not grow with its size.

The HTTP library's own pool checks every open connection at every request: with it (httpx2 2.16) a call over HTTP takes
3.0 ms of processor time in place of 1.0 (with 64 at a time, 2.1 in place of 0.9). Ours checks only the connection that
it takes or returns.

Headers belong to requests, and no cookie is kept.
"""

from __future__ import annotations

import math
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

import anyio
import httpx2
from anyio import to_thread

from gateway.config.models import Server
from gateway.errors import ConfigError
from gateway.mcp_client.auth.credentials import AuthError, Challenge, Credentials
from gateway.mcp_client.errors import PendingRequest, credentials_awaited, current_request
from gateway.mcp_client.http_connection import HttpConnection, connect, encode_request
from gateway.version import installed_version

_KEEPALIVE_S = 30.0
_MAX_IDLE = 512
Origin = tuple[str, str, int | None]
"""Scheme, host and port."""


class PooledTransport(httpx2.AsyncBaseTransport):
    """Idle connections by origin, as stacks: the last used is taken first, so surplus ones age at the bottom.

    It does not limit the number of connections; the callers' limits do.
    """

    def __init__(self, context: ssl.SSLContext, proxy: str = "") -> None:
        self._context, self._proxy = context, httpx2.Proxy(proxy) if proxy else None
        self._idle: dict[Origin, deque[HttpConnection]] = {}
        self._is_closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body = b"".join([part async for part in cast(AsyncIterable[bytes], request.stream)])
        data, origin = encode_request(request, self._proxy, body), _origin_of(request.url)
        connection = await self._acquire(origin) or await connect(
            request.url, self._context, request.extensions.get(ADDRESSES), self._proxy
        )
        try:
            await connection.send(data)
        except BaseException:
            await connection.disconnect()
            raise
        connection.release = partial(self._release, origin)
        return httpx2.Response(connection.status, headers=connection.headers, stream=connection, request=request)

    async def _acquire(self, origin: Origin) -> HttpConnection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if not connection.has_expired(_KEEPALIVE_S):
                return connection
            await connection.disconnect()
        return None

    async def _release(self, origin: Origin, connection: HttpConnection) -> None:
        """Returns a connection, and closes the oldest idle one if there are too many."""
        if self._is_closed or not connection.note_idle():
            await connection.disconnect()
            return
        idle = self._idle.setdefault(origin, deque())
        idle.append(connection)
        if len(idle) > _MAX_IDLE:
            await idle.popleft().disconnect()

    async def close_expired(self) -> None:
        """Closes idle connections that have expired: their origin may never be used again."""
        for origin, idle in list(self._idle.items()):
            while idle and idle[0].has_expired(_KEEPALIVE_S):
                await idle.popleft().disconnect()
            if not idle:
                self._idle.pop(origin, None)

    async def aclose(self) -> None:
        self._is_closed = True
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            while connections:
                await connections.pop().disconnect()


def _origin_of(url: httpx2.URL) -> Origin:
    return url.scheme, url.host, url.port


_MAX_REDIRECTS = 3
_HEADERS = {
    "accept": "*/*",
    "accept-encoding": "identity",
    "connection": "keep-alive",
    "user-agent": f"mtrl-gateway/{installed_version()}",
}
ADDRESSES = "addresses"
"""Extension of a request: the addresses to connect to, which were looked up and checked."""
_NOT_SENT_ERRORS = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError, httpx2.LocalProtocolError)
_DRAIN_S = 1.0
"""How long to read on after the answer: only a body read to its end leaves a reusable connection."""
_DRAIN_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """How servers are reached: the proxy, and files of a private authority and of the client's certificate."""

    proxy: str = ""
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def of(cls, config: Server) -> HttpAccess:
        proxy = config.proxy.get_secret_value() if config.proxy is not None else ""
        return cls(proxy, config.ca_file, config.cert_file, config.key_file)

    def build_context(self) -> ssl.SSLContext:
        """The settings of TLS connections; raises ConfigError for a file that cannot be used."""
        context = ssl.create_default_context()
        if self.ca_file is not None:
            with _named_file("ca_file", self.ca_file):
                context.load_verify_locations(self.ca_file)
        if self.cert_file is not None:
            with _named_file("cert_file", self.cert_file):
                # A key with a password is refused, in place of a question on the terminal.
                context.load_cert_chain(self.cert_file, self.key_file, password="")
        return context

    def check(self) -> None:
        """Raises ConfigError for a file that cannot be used."""
        if self.ca_file is not None or self.cert_file is not None:
            self.build_context()


@contextmanager
def _named_file(field: str, file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        remedy = "give a PEM file that the gateway can read; a key has no password, and is the certificate's"
        raise ConfigError(f"{file} cannot be used: {error}", field=field, remedy=remedy) from error


GetClient = Callable[[str], Awaitable[httpx2.AsyncBaseTransport]]
"""The connections for a URL."""


class HttpClients:
    """The connections for each way to reach servers, those of plain HTTP and of TLS apart, made when first needed."""

    def __init__(self) -> None:
        self._clients: dict[tuple[HttpAccess, bool], PooledTransport] = {}
        self._lock = anyio.Lock()

    def for_server(self, config: Server) -> GetClient:
        """Gives the clients for requests on behalf of a server; its client's certificate is for its own origin."""
        access, own = HttpAccess.of(config), httpx2.URL(config.url or "")

        async def get_client(url: str) -> PooledTransport:
            is_own = same_origin(own, httpx2.URL(url))
            return await self._find(url, access if is_own else replace(access, cert_file=None, key_file=None))

        return get_client

    async def _find(self, url: str, access: HttpAccess) -> PooledTransport:
        """The trust store takes 0.1 s to load, so it is loaded once and only for https."""
        is_secure = url.lower().startswith("https:")
        async with self._lock:
            if (access, is_secure) not in self._clients:
                plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context = await to_thread.run_sync(access.build_context) if is_secure else plain
                self._clients[access, is_secure] = PooledTransport(context, access.proxy)
            return self._clients[access, is_secure]

    async def close_expired(self) -> None:
        """Closes idle connections that have expired, again and again."""
        while True:
            await anyio.sleep(_KEEPALIVE_S)
            for client in list(self._clients.values()):
                await client.close_expired()

    async def aclose(self) -> None:
        clients, self._clients = self._clients, {}
        with anyio.move_on_after(5, shield=True):
            for client in clients.values():
                await client.aclose()


_MAX_RENEWALS = 2
"""How often one request may be sent again with new credentials."""


@dataclass(frozen=True, slots=True)
class AuthorizedClient:
    """The connections to one MCP server, with the credentials of that server, if they change with time."""

    client: httpx2.AsyncBaseTransport
    credentials: Credentials | None = None


@asynccontextmanager
async def open_response(
    client: AuthorizedClient, method: str, url: str, headers: Mapping[str, str | bytes], body: bytes | None = None
) -> AsyncIterator[httpx2.Response]:
    """Sends a request and yields the response with its body unread. Rejected credentials are renewed, and it is resent.

    Redirects are followed only within the origin, so that headers with secrets go nowhere else.
    """
    credentials, renewals = client.credentials, 0
    while True:
        held = None
        if credentials is not None:
            with credentials_awaited():
                held = await credentials.get_headers()
        response = await send_within_origin(
            client.client, method, url, headers if held is None else {**headers, **held}, body
        )
        try:
            challenge = None if held is None else _read_challenge(response, renewals)
            if credentials is None or held is None or challenge is None:
                _note_refusal(response, credentials)
                yield response
                return
        finally:
            await response.aclose()
        with credentials_awaited():
            await credentials.renew(held, challenge)
        renewals += 1


def _note_refusal(response: httpx2.Response, credentials: Credentials | None) -> None:
    pending = current_request.get()
    if response.status_code in (401, 403) and credentials is not None and pending is not None:
        pending.auth_remedy = credentials.remedy


def _read_challenge(response: httpx2.Response, renewals: int) -> Challenge | None:
    """What a refusal asks for, if other credentials may meet it."""
    if response.status_code not in (401, 403) or renewals == _MAX_RENEWALS:
        return None
    challenge = Challenge.of(response)
    return challenge if challenge.can_be_met else None


async def send_within_origin(
    client: httpx2.AsyncBaseTransport,
    method: str,
    url: str,
    headers: Mapping[str, str | bytes],
    body: bytes | None,
) -> httpx2.Response:
    """Sends a request and follows redirects within its origin; the caller closes the response."""
    target = _parse_url(url)
    for left in reversed(range(_MAX_REDIRECTS)):
        response = await send_request(client, method, target, headers, body)
        redirect = find_redirect(response) if left else None
        if response.status_code not in (307, 308) or redirect is None or not same_origin(target, redirect):
            break
        await response.aclose()
        target = redirect
    return response


_parse_url = lru_cache(maxsize=256)(httpx2.URL)


async def send_request(
    client: httpx2.AsyncBaseTransport,
    method: str,
    url: httpx2.URL,
    headers: Mapping[str, str | bytes],
    body: bytes | None,
    addresses: Sequence[str] | None = None,
) -> httpx2.Response:
    """Sends one request, to one of `addresses` if they are given; the caller closes the response."""
    own: dict[str, str | bytes] = {"host": url.netloc, **_HEADERS}
    if url.userinfo:
        own["authorization"] = b"Basic " + b64encode(f"{url.username}:{url.password}".encode())
    fields = cast(dict[str, str], {**own, **{name.lower(): value for name, value in headers.items()}})
    fields.pop("transfer-encoding", None)  # The length says where a body ends, whatever an operator configured.
    fields.pop("content-length", None)
    if body is not None:
        fields["content-length"] = str(len(body))
    extensions = None if addresses is None else {ADDRESSES: addresses}
    stream = httpx2.ByteStream(body or b"")
    return await client.handle_async_request(
        httpx2.Request(method, url, headers=fields, stream=stream, extensions=extensions)
    )


def find_redirect(response: httpx2.Response) -> httpx2.URL | None:
    """Where a response redirects to, if that is an address."""
    if not response.has_redirect_location:
        return None
    try:
        return response.request.url.join(response.headers["location"])
    except httpx2.InvalidURL:
        return None


def same_origin(origin: httpx2.URL, other_origin: httpx2.URL) -> bool:
    """Whether two addresses have one scheme, host and port."""
    return _origin_of(origin) == _origin_of(other_origin)


async def read_chunks(response: httpx2.Response, on_chunk: Callable[[bytes], Awaitable[bool]]) -> None:
    """Passes chunks to `on_chunk` until it returns true, then drains at most a little for at most a moment."""
    drained = 0
    with anyio.CancelScope() as scope:
        async for chunk in cast(AsyncIterable[bytes], response.stream):
            if not math.isinf(scope.deadline):
                drained += len(chunk)
                if drained > _DRAIN_BYTES:
                    return
            elif await on_chunk(chunk):
                scope.deadline = anyio.current_time() + _DRAIN_S


def describe_encoding(response: httpx2.Response) -> str | None:
    """What is wrong with a body that is encoded although `identity` was asked for; None if it is not."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return None
    return f"the server's answer is compressed ({encoding[:40]}) although `accept-encoding: identity` was sent"


async def read_body(response: httpx2.Response, max_bytes: int) -> bytes | None:
    """The whole body, or None if it is larger than `max_bytes`."""
    body = bytearray()
    is_too_large = False

    async def on_chunk(chunk: bytes) -> bool:
        nonlocal is_too_large
        is_too_large = len(body) + len(chunk) > max_bytes
        if not is_too_large:
            body.extend(chunk)
        return is_too_large

    await read_chunks(response, on_chunk)
    return None if is_too_large else bytes(body)


def record_status(pending: PendingRequest, response: httpx2.Response) -> None:
    """Records on the request how a server answered it, and which credentials it asks for."""
    pending.http_status, pending.auth_challenge = response.status_code, response.headers.get("www-authenticate")


def record_failure(pending: PendingRequest, error: Exception, url: httpx2.URL) -> str:
    """Records on the request whether a failed exchange reached the server; returns the reason."""
    if isinstance(error, AuthError):
        pending.http_status = 401
        pending.auth_reason, pending.auth_remedy = error.reason, error.remedy
        return error.reason
    address = f"{url.host}:{url.port or url.scheme}"
    # The message of a LocalProtocolError quotes the request, including secret headers.
    detail = "" if isinstance(error, httpx2.LocalProtocolError) else str(error)
    detail = detail or type(error).__name__
    if isinstance(error, _NOT_SENT_ERRORS):
        pending.unreachable = True
        pending.undelivered_reason = f"cannot connect to {address}: {detail}"
        return pending.undelivered_reason
    pending.lost_reason = f"the connection to {address} broke: {detail}"
    return pending.lost_reason
