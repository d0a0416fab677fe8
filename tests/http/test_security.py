"""Tests of the security middleware: token, Host, Origin and body size."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from pydantic import SecretStr

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.http.security import SecurityMiddleware
from gateway.http.settings import Settings, check_token_required, read_token
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import LiveServer, live_server_async
from tests.waiting import PATIENCE_S

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
async def locked() -> AsyncIterator[LiveServer]:
    settings = Settings(port=0, token=SecretStr(TOKEN), body_bytes=2000, allow_hosts=("gateway.example",))
    async with live_server_async(lambda: Gateway(http_sources()), settings) as server:
        yield server


async def test_protected_paths_need_the_token(locked: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = ApiClient(locked.url)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": "Bearer"}):
        answer = await client("GET", "/v1/tools", **headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "unauthorized"
    assert (await client("GET", "/v1/tools", authorization=f"bearer  {TOKEN}")).status_code == 200
    right = ApiClient(locked.url, authorization=f"Bearer {TOKEN}")
    assert (await right("GET", "/v1/tools", host="node7.cluster")).status_code == 200, "no page knows the token"
    scraped = await right("GET", "/metrics")
    assert TOKEN not in caplog.text + scraped.text


async def test_health_shows_details_only_with_the_token(locked: LiveServer) -> None:
    client = ApiClient(locked.url)
    assert (await client("GET", "/healthz")).json() == {"status": "ok"}
    full = (await client("GET", "/healthz", authorization=f"Bearer {TOKEN}")).json()
    assert full["sessions"] == 0 and full["tools"] > 5
    assert (await client("GET", "/openapi.json")).status_code == 200


async def test_foreign_host_is_refused(client: ApiClient) -> None:
    port = client.url.rpartition(":")[2]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "[::1",
        "localhost@evil.example",
    ):
        answer = await client("GET", "/v1/tools", host=host)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden")
    for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST:1"):
        assert (await client("GET", "/v1/tools", host=host)).status_code == 200


async def test_excessive_chunked_body_is_refused_while_it_is_read(locked: LiveServer) -> None:
    host, port = locked.url.removeprefix("http://").split(":")
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked"
    head += "\r\nContent-Type: application/json"
    with anyio.fail_after(PATIENCE_S):
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(head.encode() + b"\r\n\r\n")
            for _ in range(3):
                await stream.send(b"3e8\r\n" + b" " * 1000 + b"\r\n")
            answer = await stream.receive()
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_public_address_needs_a_token() -> None:
    with pytest.raises(ConfigError, match=r"(?s)0\.0\.0\.0 can be reached.*--token-file"):
        check_token_required(Settings(host="0.0.0.0"))
    for fine in (Settings(host="::1"), Settings(host="localhost"), Settings(host="0.0.0.0", token=SecretStr(TOKEN))):
        check_token_required(fine)


def test_token_file_must_contain_one_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    token = read_token(file)
    assert token.get_secret_value() == TOKEN and TOKEN not in repr(Settings(token=token))
    for wrong in ("", "two words", "ümlaut"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="token"):
            read_token(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(tmp_path / "nowhere")


async def test_websocket_is_refused() -> None:
    sent = []

    async def never(*_: object) -> None:
        raise AssertionError("the guard let it in")

    async def send(message: object) -> None:
        sent.append(message)

    await SecurityMiddleware(never, Settings())({"type": "websocket"}, never, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]
