"""One HTTP/1.1 connection to a server, with limits on what it sends besides content; responses are parsed by llhttp.

The HTTP library's connections parse with h11 and pass each piece through six layers: with them (httpx2 2.16) a call
over HTTP takes 1,280 us of processor time in place of 760 (with 64 at a time, 1,250 in place of 630).
"""

from __future__ import annotations

import base64
import re
import select
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Self

import anyio
import httpcore2
import httptools
import httpx2
from anyio import to_thread
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSAttribute, TLSStream

from gateway.mcp_client.flood_limits import WireMeter

_CONNECT_S, _WRITE_S, _CLOSE_S = 10.0, 30.0, 1.0
_NAME = re.compile(rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_ENDLESS = (anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError)


class HttpConnection(httpx2.AsyncByteStream):
    """A connection with at most one request on it, and the body of its response; the parser calls what begins `on_`.

    An iterator rather than a generator, because its readers leave it before its end without closing it.
    """

    release: Callable[[HttpConnection], Awaitable[None]]
    """Takes it when its response is closed."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._socket = stream.extra(SocketAttribute.raw_socket)  # noqa: S610 - not Django's
        self._parser = httptools.HttpResponseParser(self)
        self._idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self.meter = WireMeter()
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self._has_head = self._is_complete = self._ends_with_stream = self._stays_open = False
        self._error: Exception | None = None
        self._body, self._pieces = bytearray(), 0

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._stays_open = False  # nobody asked for a second response
        else:
            self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self.headers.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200 or self._has_head:
            return  # an interim response, after which another one follows, or one that nobody asked for
        self.status, self._has_head = status, True
        self.meter.end_head()
        self._stays_open = self._parser.should_keep_alive()
        names = {name.lower() for name, _ in self.headers}
        self._ends_with_stream = names.isdisjoint((b"content-length", b"transfer-encoding"))

    def on_body(self, body: bytes) -> None:
        if self._has_head and not self._is_complete:
            self._body += body
            self._pieces += 1

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head

    async def send(self, request: bytes) -> None:
        """Sends a request, and reads the head of its response."""
        self._begin()
        with suppress(*_ENDLESS):  # the server may have answered and closed before it read everything
            with anyio.move_on_after(_WRITE_S) as scope:
                await self._stream.send(request)
            if scope.cancelled_caught:
                raise httpx2.WriteTimeout(f"the request could not be written within {_WRITE_S:g} s")
        while not self._has_head:
            await self._read()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._body and not self._is_complete:
            await self._read()
        if not self._body:
            raise StopAsyncIteration
        chunk, pieces = bytes(self._body), self._pieces
        self._body, self._pieces = bytearray(), 0
        await self.meter.count_content(len(chunk), pieces)
        return chunk

    async def _read(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            limit = self.meter.limit_read()
            data = await self._stream.receive(limit)
        except anyio.EndOfStream:
            if not self._ends_with_stream:
                raise httpx2.RemoteProtocolError("it was closed before the response was complete") from None
            self._is_complete = True
            return
        except _ENDLESS as error:
            raise httpx2.ReadError(str(error.__cause__ or error)) from error
        self.meter.count_wire(len(data))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(str(error))
        except httptools.HttpParserUpgrade:
            self._fail("the server wants to change the protocol")
        if self._is_complete and len(data) == limit:  # There may be more, which would answer the next request.
            self._stays_open = False

    def _fail(self, reason: str) -> None:
        self._stays_open, self._error = False, httpx2.RemoteProtocolError(reason)

    def note_idle(self) -> bool:
        """Notes the end of a response; whether another request may follow."""
        self._idle_since = time.monotonic()
        return self._is_complete and self._stays_open

    def has_expired(self, keepalive_s: float) -> bool:
        """Whether it was idle for too long, or the server has closed it: nothing else comes without a request."""
        is_old = time.monotonic() - self._idle_since > keepalive_s
        return is_old or _is_readable(self._socket.fileno()) or _has_record(self._stream)

    async def aclose(self) -> None:
        await self.release(self)

    async def disconnect(self) -> None:
        """Closes the connection, unless that takes long."""
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await self._stream.aclose()


def _has_record(stream: ByteStream) -> bool:
    """Whether something is left of what came before, in a TLS record of its own."""
    tls = stream.extra(TLSAttribute.ssl_object, None)  # noqa: S610 - not Django's
    try:
        return tls is not None and tls.read(1) is not None
    except ssl.SSLWantReadError:
        return False
    except ssl.SSLError:
        return True


def _is_readable(fd: int) -> bool:
    if fd < 0:  # it is closed
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def encode_request(request: httpx2.Request, proxy: httpx2.Proxy | None, body: bytes) -> bytes:
    """A request as it is written; raises httpx2.LocalProtocolError for a header that HTTP cannot express."""
    target, headers = request.url.raw_path, request.headers.raw
    if proxy is not None and request.url.scheme == "http":
        target, headers = b"http://%b%b" % (request.url.netloc, target), [*headers, *_proxy_headers(proxy)]
    for name, value in headers:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise httpx2.LocalProtocolError(f"the value of the header {name!r} cannot be sent")
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (request.method.encode("ascii"), target, b"".join(lines), body)


def _proxy_headers(proxy: httpx2.Proxy) -> list[tuple[bytes, bytes]]:
    if proxy.raw_auth is None:
        return []
    return [(b"Proxy-Authorization", b"Basic " + base64.b64encode(b"%b:%b" % proxy.raw_auth))]


async def connect(
    url: httpx2.URL, context: ssl.SSLContext, addresses: Sequence[str] | None, proxy: httpx2.Proxy | None
) -> HttpConnection:
    """Connects to a URL's origin, to one of `addresses` if they are given; a proxy looks them up by itself."""
    if proxy is None:
        stream = await _dial(addresses or [url.raw_host.decode()], url)
    else:
        stream = await _dial([proxy.url.raw_host.decode()], proxy.url)
    try:
        if proxy is not None and proxy.url.scheme == "https":
            stream = await _start_tls(stream, await to_thread.run_sync(_proxy_context), proxy.url)
        if proxy is not None and url.scheme == "https":
            await _open_tunnel(stream, url, proxy)
        if url.scheme == "https":
            stream = await _start_tls(stream, context, url)
        return HttpConnection(stream)
    except BaseException:
        await anyio.aclose_forcefully(stream)
        raise


_proxy_context = lru_cache(maxsize=1)(httpcore2.default_ssl_context)
"""It takes 34 ms to make."""


def _port(url: httpx2.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


@contextmanager
def _connecting() -> Iterator[None]:
    try:
        with anyio.fail_after(_CONNECT_S):
            yield
    except TimeoutError as error:
        raise httpx2.ConnectTimeout(f"no connection within {_CONNECT_S:g} s") from error
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
        raise httpx2.ConnectError(str(error)) from error


async def _dial(addresses: Sequence[str], url: httpx2.URL) -> ByteStream:
    *others, last = addresses
    for address in others:
        with suppress(httpx2.ConnectError, httpx2.ConnectTimeout), _connecting():
            return await anyio.connect_tcp(address, _port(url))
    with _connecting():
        return await anyio.connect_tcp(last, _port(url))


async def _start_tls(stream: ByteStream, context: ssl.SSLContext, url: httpx2.URL) -> ByteStream:
    host = url.raw_host.decode()
    context.set_alpn_protocols(["http/1.1"])
    with _connecting():
        return await TLSStream.wrap(
            stream, hostname=host, ssl_context=context, standard_compatible=False, server_side=False
        )


async def _open_tunnel(stream: ByteStream, url: httpx2.URL, proxy: httpx2.Proxy) -> None:
    """Has the proxy connect to the URL's origin."""
    place = b"%b:%d" % (b"[%b]" % url.raw_host if b":" in url.raw_host else url.raw_host, _port(url))
    headers = b"".join(b"%b: %b\r\n" % header for header in [(b"Host", place), *_proxy_headers(proxy)])
    connection = HttpConnection(stream)
    with _connecting():
        try:
            await connection.send(b"CONNECT %b HTTP/1.1\r\n%b\r\n" % (place, headers))
        except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.WriteTimeout) as error:
            raise httpx2.ProxyError(str(error)) from error
    if not 200 <= connection.status < 300:
        raise httpx2.ProxyError(f"the proxy answers with HTTP {connection.status}")
