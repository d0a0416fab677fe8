"""Several callers of one gateway: each has its own tools and sessions, and its calls are logged."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from gateway.errors import ConfigError
from gateway.gateway import Gateway
from gateway.http.callers import read_callers
from gateway.http.settings import Settings
from gateway.serving import build_apps, settings_of
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import live_server_async

TOKENS = {name: name * 8 for name in ("alice", "bob", "ops")}
CALLERS: dict[str, Any] = {
    "alice": {"token": TOKENS["alice"], "tools": ["add", "fee*"]},
    "bob": {"token": TOKENS["bob"], "tools": ["pure_*"]},
    "ops": {"token": TOKENS["ops"], "operator": True},
}


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, dict[str, ApiClient]]]:
    """A gateway with three callers; gives its address, and a client of each."""
    file = folder / "callers.json"
    file.write_text(json.dumps(CALLERS))
    settings, gateway = Settings(port=0, callers=file), Gateway(http_sources())
    build, lifespans = build_apps(gateway, settings)
    async with live_server_async(lambda: gateway, settings, build=build, background=lifespans) as server:
        bearers = {name: f"Bearer {token}" for name, token in TOKENS.items()}
        yield server.url, {name: ApiClient(server.url, authorization=bearer) for name, bearer in bearers.items()}


async def listed(client: ApiClient) -> set[str]:
    answer = await client("GET", "/v1/tools?audience=all")
    return {tool["function"]["name"] for tool in answer.json()["data"]}


async def test_caller_sees_and_calls_its_own_tools_alone(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, clients):
        assert {"add"} <= await listed(clients["alice"]) and "pure_add" not in await listed(clients["alice"])
        assert await listed(clients["bob"]) == {"pure_add"}
        assert {"add", "pure_add"} <= await listed(clients["ops"])
        id = await clients["alice"].begin()
        assert (await clients["alice"].call(id, "add", '{"a": 1}'))["results"][0]["outcome"] == "ok"
        assert (await clients["alice"].call(id, "pure_add", '{"a": 1}'))["results"][0]["outcome"] == "invalid"
        refused = await clients["alice"]("POST", "/v1/sessions", {"tools": ["pure_add"]})
        assert refused.status_code == 409 and "pure_add" in refused.text
        id = await clients["bob"].begin()
        answer = await clients["bob"].call(id, "feedback_gsm8k", audience="loop")
        assert answer["results"][0]["outcome"] == "invalid"


async def test_session_of_one_caller_is_unknown_to_the_others(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, clients):
        id = await clients["alice"].begin()
        for name, status in (("bob", 404), ("ops", 404), ("alice", 200)):
            assert (await clients[name]("GET", f"/v1/sessions/{id}")).status_code == status


async def test_mcp_clients_have_the_rights_of_their_token(tmp_path: Path) -> None:
    async with served(tmp_path) as (url, _), AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx2.AsyncClient(headers={"authorization": f"Bearer {TOKENS['bob']}"}))
        client = await stack.enter_async_context(Client(streamable_http_client(f"{url}/mcp", http_client=http)))
        assert [tool.name for tool in (await client.list_tools()).tools] == ["pure_add"]
        assert (await client.call_tool("pure_add", {"a": 1, "b": 2})).content[0].text == "3"  # type: ignore[union-attr]


async def test_wrong_token_opens_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (url, _):
        for headers in ({}, {"authorization": "Bearer nobody"}, {"authorization": f"Basic {TOKENS['ops']}"}):
            client = ApiClient(url, **headers)
            assert (await client("GET", "/v1/tools")).status_code == 401
            assert (await client("GET", "/healthz")).json() == {"status": "ok"}


async def test_each_call_is_one_audit_line_with_its_callers_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as (_, clients):
        id = await clients["alice"].begin()
        await clients["alice"].call(id, "add", '{"a": 123456}')
        await clients["alice"].call(id, "made\nup")
    lines = [record for record in caplog.records if record.name == "gateway.audit"]
    fields = [record.fields for record in lines]  # type: ignore[attr-defined]
    assert [(each["caller"], each["tool"], each["outcome"]) for each in fields] == [
        ("alice", "add", "ok"),
        ("alice", "made\nup", "invalid"),
    ]
    assert all(record.levelno == logging.INFO and "\n" not in record.getMessage() for record in lines)
    assert id not in caplog.text and "123456" not in caplog.text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "the form is"),
        ("{}", "there are no callers"),
        (json.dumps({"a": {"token": "short"}}), "at least 16"),
        (json.dumps({"a": {"token": "t" * 20}, "b": {"token": "t" * 20}}), "two have the same token"),
        (json.dumps({"a": {"token": "t" * 20, "tool": []}}), "a.tool"),
    ],
)
def test_wrong_file_of_callers_says_what_to_do_without_a_token(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "callers.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_callers(file)
    assert "t" * 20 not in str(caught.value) and "short" not in str(caught.value)


def test_callers_exclude_one_token_for_all(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 20)
    with pytest.raises(ConfigError, match="excludes"):
        settings_of("127.0.0.1", 0, tmp_path / "token", (), tmp_path / "callers.json")
