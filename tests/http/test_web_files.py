"""Tests of /ui and its files, and of their Content-Security-Policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.web.static_files import SHARED_PACKAGE, file_names
from tests.http.api_client import ApiClient, http_sources
from tests.live_server import live_server_async

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(file for house in ("gateway", "mtrl_plugins") for file in (ROOT / house).rglob("*.js"))
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|javascript:|DOMParser"
)


async def test_web_files_have_a_strict_content_security_policy(client: ApiClient) -> None:
    for path in ("/ui", *(f"/ui/{name}" for name in sorted(file_names(SHARED_PACKAGE)))):
        answer = await client("GET", path)
        assert answer.status_code == 200, path
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", ["files.py", "__init__.py", "..%2Fhttp%2Fapp.py", "%2Fetc%2Fpasswd", "no.js"])
async def test_other_files_of_the_package_are_not_served(client: ApiClient, name: str) -> None:
    assert (await client("GET", f"/ui/{name}")).status_code == 404


async def test_page_needs_no_token_but_its_data_does() -> None:
    settings = Settings(port=0, token=SecretStr("word"))
    async with live_server_async(lambda: Gateway(http_sources()), settings) as server:
        client = ApiClient(server.url)
        assert [(await client("GET", path)).status_code for path in ("/ui", "/ui/gateway.js")] == [200, 200]
        for path in ("/v1/live/calls", "/uil", "/v1/tools"):
            assert (await client("GET", path)).status_code == 401


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: f"{file.parts[-3]}/{file.name}")
def test_scripts_never_turn_text_into_markup_or_code(file: Path) -> None:
    text = file.read_text()
    assert MARKUP.findall(text) == []
    assert not re.search(r"['\"`](?:https?:)?//[a-z0-9.-]+\.[a-z]", text.replace("http://www.w3.org/2000/svg", ""))
    assert len(text.splitlines()) <= 350
