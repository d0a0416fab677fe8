"""Who may come in: tokens, names, origins and sizes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx2
import pytest
from pydantic import SecretStr

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.http.guard import Guard
from gateway.http.settings import Settings, read_token, refuse_open_door
from tests.http.rooms import Caller, rooms
from tests.served import Served, served

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
async def locked() -> AsyncIterator[Served]:
    settings = Settings(port=0, token=SecretStr(TOKEN), body_bytes=2000, allow_hosts=("gateway.example",))
    async with served(lambda: Gateway(rooms()), settings) as at:
        yield at


async def test_a_token_opens_what_nothing_else_does(locked: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ask = Caller(locked.url)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": "Bearer"}):
        answer = await ask("GET", "/v1/tools", **headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "unauthorized"
    assert (await ask("GET", "/v1/tools", authorization=f"bearer  {TOKEN}")).status_code == 200
    right = Caller(locked.url, authorization=f"Bearer {TOKEN}")
    assert (await right("GET", "/v1/tools")).status_code == 200
    scraped = await right("GET", "/metrics")
    assert TOKEN not in caplog.text + scraped.text


async def test_a_token_is_asked_for_even_where_there_is_nothing(locked: Served) -> None:
    ask = Caller(locked.url)
    assert [(await ask("GET", path)).status_code for path in ("/metrics", "/nothing", "/mcp")] == [401, 401, 401]


async def test_a_probe_learns_a_word_and_a_friend_learns_all(locked: Served) -> None:
    ask = Caller(locked.url)
    assert (await ask("GET", "/healthz")).json() == {"status": "ok"}
    full = (await ask("GET", "/healthz", authorization=f"Bearer {TOKEN}")).json()
    assert full["sessions"] == 0 and full["tools"] > 5
    assert (await ask("GET", "/docs")).status_code == 200


async def test_only_our_own_name_is_served(ask: Caller) -> None:
    port = ask.url.rpartition(":")[2]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "[::1",
        "localhost@evil.example",
    ):
        answer = await ask("GET", "/v1/tools", host=host)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden")
    for host in ("localhost", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST:1"):
        assert (await ask("GET", "/v1/tools", host=host)).status_code == 200


async def test_only_our_own_pages_may_call(ask: Caller) -> None:
    for origin in ("https://evil.example", "null", "", "http://localhost.evil.example", "file://"):
        answer = await ask("POST", "/v1/sessions", {}, origin=origin)
        assert answer.status_code == 403
    for origin in ("http://localhost:3000", "http://127.0.0.1"):
        assert (await ask("GET", "/v1/tools", origin=origin)).status_code == 200


async def test_names_can_be_allowed(locked: Served) -> None:
    ask = Caller(locked.url, authorization=f"Bearer {TOKEN}")
    assert (await ask("GET", "/v1/tools", origin="https://gateway.example")).status_code == 200
    assert (await ask("GET", "/v1/tools", origin="https://other.example")).status_code == 403
    assert (await ask("GET", "/v1/tools", host="node7.cluster", origin="http://node7.cluster:99")).status_code == 200


async def test_who_has_the_token_may_call_mcp_by_any_name_too(locked: Served) -> None:
    headers = {
        "authorization": f"Bearer {TOKEN}",
        "accept": "application/json, text/event-stream",
        "host": "node7.cluster:8765",
    }
    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
    async with httpx2.AsyncClient(base_url=locked.url, headers=headers, trust_env=False) as http:
        assert (await http.post("/mcp", json=hello)).status_code == 200
        assert (await http.post("/mcp", json=hello, headers={"origin": "https://evil.example"})).status_code == 403


async def test_a_body_that_says_it_is_too_long_is_not_read(locked: Served) -> None:
    ask = Caller(locked.url, authorization=f"Bearer {TOKEN}")
    answer = await ask("POST", "/v1/sessions", b"x" * 2001)
    assert answer.status_code == 413 and answer.headers["connection"] == "close"
    assert answer.json()["error"]["message"] == "A body may have 2000 bytes."


async def test_a_body_without_a_length_is_refused_while_it_is_read(locked: Served) -> None:
    host, port = locked.url.removeprefix("http://").split(":")
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked"
    with anyio.fail_after(10):
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(head.encode() + b"\r\n\r\n")
            for _ in range(3):
                await stream.send(b"3e8\r\n" + b" " * 1000 + b"\r\n")
            answer = await stream.receive()
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_body_in_pieces_is_read_whole(locked: Served) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"tools": '
        yield b'["add"]}'

    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False) as http:
        answer = await http.post(locked.url + "/v1/sessions", content=pieces())
    assert answer.status_code == 201


def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(ConfigError, match=r"(?s)0\.0\.0\.0 can be reached.*--token-file"):
        refuse_open_door(Settings(host="0.0.0.0"))
    for fine in (Settings(host="::1"), Settings(host="localhost"), Settings(host="0.0.0.0", token=SecretStr(TOKEN))):
        refuse_open_door(fine)


def test_a_token_file_holds_one_token(tmp_path: Path) -> None:
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


async def test_a_websocket_is_sent_away() -> None:
    sent = []

    async def never(*_: object) -> None:
        raise AssertionError("the guard let it in")

    async def send(message: object) -> None:
        sent.append(message)

    await Guard(never, Settings())({"type": "websocket"}, never, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]
