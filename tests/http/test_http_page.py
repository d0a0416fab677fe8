"""/ui and its files: served as they are in the package, under a policy that lets nothing else in."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import SecretStr

from gateway.gateway import Gateway
from gateway.http.settings import Settings
from gateway.page.files import SHARED, names, piece
from tests.http.rooms import Caller, rooms
from tests.served import served

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(file for house in ("gateway", "trainer") for file in (ROOT / house).rglob("*.js"))
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|javascript:|DOMParser"
)


async def test_the_page_and_its_files_come_under_a_strict_policy(ask: Caller) -> None:
    for path in ("/ui", *(f"/ui/{name}" for name in sorted(names(SHARED)))):
        answer = await ask("GET", path)
        assert answer.status_code == 200, path
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


async def test_what_a_browser_has_already_is_not_sent_again() -> None:
    told: list[Any] = []

    async def asked(name: str, known: bytes) -> tuple[int, bytes]:
        async def send(message: Any) -> None:
            told.append(message)

        found = piece(name, SHARED)
        assert found is not None
        await found({"headers": [(b"if-none-match", known)]}, anyio.sleep_forever, send)
        start, body = told[-2:]
        return start["status"], body["body"]

    etag = getattr(piece("look.css", SHARED), "etag", b"")
    assert await asked("look.css", etag) == (304, b"")
    assert (await asked("look.css", b'"old"'))[0] == (await asked("dom.js", etag))[0] == 200


@pytest.mark.parametrize("name", ["files.py", "__init__.py", "..%2Fhttp%2Fdocs.html", "%2Fetc%2Fpasswd", "no.js"])
async def test_nothing_else_of_the_package_is_served(ask: Caller, name: str) -> None:
    assert (await ask("GET", f"/ui/{name}")).status_code == 404


async def test_the_page_needs_no_token_and_what_it_shows_does() -> None:
    settings = Settings(port=0, token=SecretStr("word"))
    async with served(lambda: Gateway(rooms()), settings) as at:
        ask = Caller(at.url)
        assert [(await ask("GET", path)).status_code for path in ("/ui", "/ui/gateway.js")] == [200, 200]
        for path in ("/v1/live/calls", "/v1/live/sessions", "/v1/tapes", "/v1/tapes/any", "/uil", "/v1/tools"):
            assert (await ask("GET", path)).status_code == 401


def test_a_file_is_taken_from_the_first_package_that_has_it() -> None:
    assert piece("dom.js", "gateway.http", SHARED) == piece("dom.js", SHARED)
    assert piece("docs.html", "gateway.http", SHARED) is not None and piece("docs.html", SHARED) is None


def test_what_a_page_needs_is_in_the_wheel() -> None:
    listed = re.findall(r'"(\*\*/\*\.\w+)"', (ROOT / "pyproject.toml").read_text())
    wanted = {file.suffix for file in (ROOT / "gateway" / "page").iterdir() if file.is_file()} - {".py"}
    assert {suffix for suffix in wanted if not any(fnmatch(f"x/y{suffix}", one) for one in listed)} == set()


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: f"{file.parts[-3]}/{file.name}")
def test_no_script_makes_markup_or_code_of_text(file: Path) -> None:
    text = file.read_text()
    assert MARKUP.findall(text) == []
    assert not re.search(r"['\"`](?:https?:)?//[a-z0-9.-]+\.[a-z]", text.replace("http://www.w3.org/2000/svg", ""))
    assert len(text.splitlines()) <= 350
