"""Reads what a program asks a proxy for: strictly, since a request that two servers read differently is an attack."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.sandbox.host_rules import normalize, split_port

REQUEST_LINE = re.compile(rb"([A-Z]{3,16}) ([\x21-\x7e]+) HTTP/1\.[01]")
HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
DROPPED = frozenset(
    (b"host", b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"proxy-connection", b"proxy-authorization")
)
"""Headers that are meant for this proxy, or replaced by it."""


class BadRequest(Exception):
    """A request that the proxy does not read; its text is for the program."""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request for a tunnel, or one that is passed on."""

    host: str
    port: int
    head: bytes = b""
    """What is sent on; nothing for a tunnel."""
    body_bytes: int = 0

    @property
    def is_tunnel(self) -> bool:
        return not self.head


def parse_request(head: bytes) -> ProxyRequest:
    """Reads a request's lines up to the empty one; raises BadRequest."""
    first, *lines = head.split(b"\r\n")
    match = REQUEST_LINE.fullmatch(first)
    if match is None:
        raise BadRequest("this is no request of HTTP/1.1")
    headers = [HEADER.fullmatch(line) for line in lines]
    if not all(headers):
        raise BadRequest("a header cannot be read")
    pairs = [(found[1], found[2]) for found in headers if found is not None]
    method, target = match[1], match[2].decode("ascii")
    try:
        if method == b"CONNECT":
            host, port = split_port(target)
            if port is None:
                raise BadRequest("CONNECT needs a port")
            return ProxyRequest(normalize(host), port)
        return _plain_request(method, target, pairs)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _plain_request(method: bytes, target: str, headers: list[tuple[bytes, bytes]]) -> ProxyRequest:
    """A request with a whole address, sent on for the host of the address alone: the header `Host` is not believed."""
    scheme, slashes, rest = target.partition("://")
    if not slashes or scheme.lower() != "http":
        raise BadRequest("the proxy takes CONNECT, and addresses that begin with http://")
    match = re.match(r"[^/?#]*", rest)
    authority = match[0] if match else ""
    path = rest[len(authority) :].partition("#")[0]
    host, port = split_port(authority)
    name = normalize(host)
    lengths = [value.strip() for key, value in headers if key.lower() == b"content-length"]
    if any(key.lower() == b"transfer-encoding" for key, _ in headers):
        raise BadRequest("bodies in chunks are not passed on: send Content-Length, or use https")
    if len(lengths) > 1 or not all(re.fullmatch(rb"[0-9]{1,12}", length) for length in lengths):
        raise BadRequest("Content-Length cannot be read")
    kept = [key + b": " + value for key, value in headers if key.lower() not in DROPPED]
    path = path if path.startswith("/") else f"/{path}"
    host_line = (f"[{name}]" if ":" in name else name) + (f":{port}" if port not in (None, 80) else "")
    lines = (method + f" {path} HTTP/1.1".encode(), f"Host: {host_line}".encode(), *kept, b"Connection: close")
    return ProxyRequest(name, port or 80, b"\r\n".join(lines) + b"\r\n\r\n", int(lengths[0]) if lengths else 0)
