"""Tests of the web UI for operators: servers with their logs and restarts, groups of tools, refused files, sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gateway.http.settings import Settings
from tests.browser.page import Page
from tests.browser.sample_gateway import HOSTILE, sample_gateway_with_servers
from tests.live_server import LiveServer, live_server
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(sample_gateway_with_servers, Settings(port=0)) as served:
        yield served


def wait_for_no_session(server: LiveServer, within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while server.gateway.sessions:
        assert time.monotonic() < deadline, "a session is still open"


def show_server(page: Page, server: LiveServer, name: str) -> None:
    page.open(f"{server.url}/ui#/servers/{name}")
    page.until("document.querySelector('.facts dd')")


def test_server_page_shows_state_tools_and_the_log_as_text(page: Page, server: LiveServer) -> None:
    show_server(page, server, "chatty")
    page.sees("ready", ".log")
    assert HOSTILE in page.text(".log") and "\\u202e" in page.text(".log")
    assert page.js("document.title").endswith("mtrl gateway")
    assert page.count("main script, main img[src=x], [onerror]") == 0
    page.click("summary", "Its 2 tools")
    page.click("details a", "say")
    page.sees("Says it.", ".description")


def test_server_is_restarted_after_a_second_click(page: Page, server: LiveServer) -> None:
    show_server(page, server, "chatty")
    page.click("main button", "Restart")
    page.sees("state that the server keeps is lost", "[aria-live]")
    page.click("main button", "Really restart")
    page.sees("an operator restarted it", ".notice")
    page.sees("It is up again.", "[aria-live]")
    page.until("document.querySelector('.log').textContent.split('started]').length === 3")
    page.until(
        "[...document.querySelectorAll('.facts dt')].find(term => term.textContent === 'Restarts')"
        ".nextElementSibling.textContent === '1'"
    )


@pytest.mark.parametrize("leave", ["location.hash = '#/tools/add'", "location.href = 'about:blank'"])
def test_kept_session_serves_further_calls_and_closes_when_the_tool_is_left(
    page: Page, server: LiveServer, leave: str
) -> None:
    page.open(f"{server.url}/ui#/tools/remember")
    page.click(".keep")
    for word in ("first", "second"):
        page.type("[data-field=word] textarea", word)
        page.click("button", "Call")
        page.sees(word, ".result")
    page.sees("first", ".result")
    page.sees("It is open until you leave.")
    assert len(server.gateway.sessions) == 1
    page.js(f"void ({leave})")
    wait_for_no_session(server)
