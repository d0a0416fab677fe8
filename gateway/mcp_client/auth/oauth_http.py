"""Requests to authorization servers: bounded in time and size, without redirects to another origin, secrets unquoted.

An MCP server names these addresses, so they are checked: https, or http only where the MCP server itself is; and of
the Internet, or of the loopback, link-local or private kind only where the MCP server or the configured issuer is.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlencode, urlsplit

import anyio
import httpx2

from gateway.config.server_auth import LOOPBACK_HOSTS
from gateway.mcp_client.auth.credentials import AuthError
from gateway.mcp_client.http_client import GetClient, find_redirect, same_origin, send_request
from gateway.sandbox.host_rules import embedded_addresses, parse_address

REQUEST_S = 15.0
"""Deadline of one request."""
MAX_ANSWER_BYTES = 256 * 1024
_MAX_REDIRECTS = 3
_MAX_QUOTE = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its status, and its JSON; None if it is not JSON."""

    url: str
    status: int
    document: Any

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.document if isinstance(self.document, dict) else {}

    def describe_error(self, secrets: Collection[str | None] = ()) -> str:
        """`HTTP 400: invalid_grant (expired)`, with the server's words, cut, and without our secrets."""
        words = f"HTTP {self.status}"
        if self.document is None:
            return f"{words}, which is not JSON"
        error, description = (self.fields.get(key) for key in ("error", "error_description"))
        if isinstance(error, str) and error:
            words += f": {quote_text(error, secrets)}"
            if isinstance(description, str) and description:
                words += f" ({quote_text(description, secrets)})"
        return words


def quote_text(text: str, secrets: Collection[str | None] = ()) -> str:
    """Another party's text for an error message: printable, short, and without our secrets."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable if len(printable) <= _MAX_QUOTE else f"{printable[:_MAX_QUOTE]}..."


class OAuthHttp:
    """Sends requests on behalf of one MCP server."""

    def __init__(self, get_client: GetClient, server_url: str, issuer: str | None) -> None:
        self._get_client = get_client
        trusted = [urlsplit(url).hostname for url in (server_url, issuer) if url is not None]
        self._trusted_hosts = frozenset(host for host in trusted if host is not None)
        self._plain_hosts = set(self._trusted_hosts)
        if self._plain_hosts & set(LOOPBACK_HOSTS):
            self._plain_hosts |= set(LOOPBACK_HOSTS)

    def check_url(self, url: str, purpose: str) -> str:
        """The address, if tokens and logins may go there; raises `AuthError`."""
        try:
            parts = urlsplit(url)
            host = parts.hostname
        except ValueError:
            parts, host = urlsplit(""), None
        is_allowed = parts.scheme == "https" or (parts.scheme == "http" and host in self._plain_hosts)
        if not host or not is_allowed or parts.username is not None or not url.isascii() or not url.isprintable():
            reason = f"{purpose} is at {quote_text(url)}, where no token may go: it is not https"
            raise AuthError(reason, "report it to the server's operator")
        return url

    async def _resolve(self, url: httpx2.URL, place: str) -> list[str] | None:
        """The addresses to connect to, if not any, since a second look-up may answer otherwise."""
        if url.host in self._trusted_hosts:
            return None
        addresses = await _look_up(url.host, place)
        kinds = {kind for address in addresses if (kind := _kind(address)) is not None}
        for host in self._trusted_hosts if kinds else ():
            kinds -= {_kind(address) for address in await _look_up(host, host)}
        if kinds:
            reason = f"{place} is at a {'and '.join(sorted(kinds))} address, where its server is not"
            raise AuthError(reason, "if that is right, name the authorization server as `oauth.issuer` of this server")
        return addresses

    async def get(self, url: str, purpose: str) -> Answer:
        """Gets a metadata document; follows redirects within the origin."""
        target = httpx2.URL(self.check_url(url, purpose))
        for _ in range(_MAX_REDIRECTS):
            answer, redirect = await self._send("GET", target, {}, None, purpose)
            if redirect is None or not same_origin(redirect, target):
                return answer
            target = redirect
        return answer

    async def post_form(self, url: str, form: Mapping[str, str], headers: Mapping[str, str], purpose: str) -> Answer:
        """Posts a form with secrets; redirects are not followed."""
        content = {**headers, "content-type": "application/x-www-form-urlencoded"}
        target = httpx2.URL(self.check_url(url, purpose))
        return (await self._send("POST", target, content, urlencode(form).encode(), purpose))[0]

    async def post_json(self, url: str, document: Mapping[str, Any], purpose: str) -> Answer:
        target = httpx2.URL(self.check_url(url, purpose))
        body = json.dumps(document).encode()
        return (await self._send("POST", target, {"content-type": "application/json"}, body, purpose))[0]

    async def _send(
        self, method: str, url: httpx2.URL, headers: Mapping[str, str], body: bytes | None, purpose: str
    ) -> tuple[Answer, httpx2.URL | None]:
        """The answer, and where it redirects to."""
        place = f"{purpose} at {url.host}:{url.port or url.scheme}"
        try:
            with anyio.fail_after(REQUEST_S):
                client = await self._get_client(str(url))
                addresses = await self._resolve(url, place)
                headers = {"accept": "application/json", **headers}
                response = await send_request(client, method, url, headers, body, addresses)
                try:
                    redirect = find_redirect(response)
                    content = await _read_bounded(response)
                finally:
                    await response.aclose()
        except AuthError:
            raise
        except TimeoutError:
            raise AuthError(f"{place} did not answer within {REQUEST_S:g} s", "try again later") from None
        except (httpx2.TransportError, httpx2.StreamError, httpx2.InvalidURL) as error:
            # Only the type: its text may quote the request.
            raise AuthError(f"{place} cannot be reached ({type(error).__name__})", "try again later") from None
        if content is None:
            raise AuthError(f"{place} answered with more than {MAX_ANSWER_BYTES} bytes", "report it to its operator")
        return Answer(str(url), response.status_code, _parse(content)), redirect


async def _look_up(host: str, place: str) -> list[str]:
    try:
        found = await anyio.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise AuthError(f"{place} cannot be reached (its name has no address)", "try again later") from None
    return list(dict.fromkeys(address[0].partition("%")[0] for *_, address in found))


def _kind(text: str) -> str | None:
    """Whether an address is of this machine or its network; None for one of the Internet."""
    address = parse_address(text)
    if address is None:
        return "unknown"
    for each in embedded_addresses(address):
        if each.is_loopback or each.is_unspecified:
            return "loopback"
        if each.is_link_local:
            return "link-local"
        if not each.is_global or each.is_multicast:
            return "private"
    return None


async def _read_bounded(response: httpx2.Response) -> bytes | None:
    content = bytearray()
    async for chunk in cast(AsyncIterable[bytes], response.stream):
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            return None
    return bytes(content)


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
