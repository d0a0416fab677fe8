"""Web pages of other servers, and callers that a proxy and the gateway could understand differently, get nothing."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import httpx2
import pytest

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.serving import settings_of
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import LiveServer, live_server_async
from tests.waiting import PATIENCE_S

JSON = "application/json"


@pytest.fixture
async def gateway() -> AsyncIterator[LiveServer]:
    pages = ("http://localhost:3000", "https://page.example")
    settings = Settings(port=0, allow_origins=pages, allow_hosts=("tools.example",))
    async with live_server_async(lambda: Gateway(http_sources()), settings) as server:
        yield server


def port_of(server: LiveServer) -> str:
    return server.url.rpartition(":")[2]


ORIGINS = {
    "another local port": "http://localhost:9999",
    "the same host without the port": "http://127.0.0.1",
    "the default port of a named host": "http://page.example",
    "a named host's other port": "https://page.example:8443",
    "a sandboxed page": "null",
    "nothing": "",
    "a user name like our host": "http://127.0.0.1:{port}@evil.example",
    "our host as a user name": "http://evil.example@127.0.0.1:{port}",
    "a path": "http://127.0.0.1:{port}/ui",
    "no number as port": "http://127.0.0.1:{port}x",
    "a foreign host with our port": "http://evil.example:{port}",
    "bytes that are no text": "http://127.0.0.1:{port}\u00ff",
}


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/calls", "/mcp"])
async def test_pages_of_other_origins_are_refused(gateway: LiveServer, path: str) -> None:
    async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        for name, origin in ORIGINS.items():
            origin_bytes = origin.format(port=port_of(gateway)).encode("latin-1")
            headers = [(b"origin", origin_bytes), (b"content-type", JSON.encode())]
            answer = await http.post(gateway.url + path, content=b"{}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden"), name
    assert not gateway.gateway.sessions


async def test_our_own_and_named_hosts_and_pages_may_call(gateway: LiveServer) -> None:
    client = ApiClient(gateway.url)
    for origin in (gateway.url, "HTTP://localhost:3000", "https://tools.example"):
        assert (await client("GET", "/v1/tools", origin=origin)).status_code == 200
    assert (await client("GET", "/v1/tools", host="tools.example")).status_code == 200
    with pytest.raises(ConfigError, match="is no origin"):
        settings_of("127.0.0.1", 0, None, ["http://localhost:3000/"])


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/json"]
)
async def test_body_that_is_not_declared_as_json_is_refused(gateway: LiveServer, content_type: str | None) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"{}"

    headers = {} if content_type is None else {"content-type": content_type}
    async with httpx2.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        for path in ("/v1/sessions", "/v1/calls", "/mcp"):
            answer = await http.post(gateway.url + path, content=b"{}", headers=headers)
            assert answer.status_code == 415 and JSON in answer.json()["error"]["remedy"]
        assert (await http.post(gateway.url + "/v1/sessions", content=pieces())).status_code == 415
    assert not gateway.gateway.sessions


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
    ],
)
async def test_other_pages_cannot_load_answers_as_images_or_scripts(
    gateway: LiveServer, headers: dict[str, str], status: int
) -> None:
    assert (await ApiClient(gateway.url)("GET", "/v1/tools", **headers)).status_code == status


def send_raw(server: LiveServer, head: str) -> bytes:
    with socket.create_connection(("127.0.0.1", int(port_of(server))), timeout=30) as caller:
        caller.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while piece := caller.recv(65_536):
            answer += piece
        return answer


@pytest.mark.parametrize(
    "lines",
    [
        ["Host: 127.0.0.1", "Host: 127.0.0.1"],
        ["Host: evil.example", "Host: 127.0.0.1"],
        ["Host: 127.0.0.1", "Origin: http://localhost:9999", "Origin: http://127.0.0.1"],
        ["Host: 127.0.0.1", "Authorization: Bearer a", "Authorization: Bearer b"],
        ["Host: 127.0.0.1", "Content-Type: text/plain", "Content-Type: application/json"],
    ],
)
async def test_header_that_occurs_twice_is_refused(gateway: LiveServer, lines: list[str]) -> None:
    answer = send_raw(gateway, "\r\n".join(["GET /v1/tools HTTP/1.1", *lines]))
    assert answer.startswith(b"HTTP/1.1 400 ")
