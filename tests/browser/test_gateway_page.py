"""Tests of the gateway's web UI in a real browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.http.settings import Settings
from tests.browser.gateway_stage import post_json
from tests.browser.page import Page
from tests.browser.sample_gateway import HOSTILE, REMEDY, BlockingTool, sample_gateway
from tests.live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def slow() -> BlockingTool:
    return BlockingTool()


@pytest.fixture(scope="module")
def server(slow: BlockingTool) -> Iterator[LiveServer]:
    with live_server(lambda: sample_gateway(slow), Settings(port=0)) as served:
        yield served


def make_calls(server: LiveServer, *calls: tuple[str, Any], task: str = "task-7") -> str:
    """Opens a session as another client and makes calls in it."""
    id = str(post_json(f"{server.url}/v1/sessions", {"task_id": task})["id"])
    for name, arguments in calls:
        function = {"name": name, "arguments": json.dumps(arguments)}
        post_json(f"{server.url}/v1/sessions/{id}/calls", {"tool_calls": [{"id": "1", "function": function}]})
    return id


def test_overview_shows_reason_and_remedy_of_a_server_that_is_down(page: Page, server: LiveServer) -> None:
    page.open(f"{server.url}/ui")
    page.sees("cannot connect", ".server[data-state=down]")
    page.sees(f"start it: {REMEDY}", ".server[data-state=down]")
    page.sees("1 server down", "#health")


def test_tool_can_be_found_and_called_through_its_form(page: Page, server: LiveServer) -> None:
    page.open(f"{server.url}/ui#/tools")
    page.type("#search", "two numbers pure")
    page.until("document.querySelectorAll('.item').length === 1")
    page.click(".item", "pure_add")
    page.sees("the first", ".schema")
    page.type("[data-field=a] input", "40")
    page.type("[data-field=b] input", "2")
    page.click("button", "Call")
    page.sees("42", ".result pre")
    assert page.text(".result .chip") == "ok"


def test_form_covers_all_schema_types(page: Page, server: LiveServer) -> None:
    """Strings, numbers, booleans, lists, objects, references, unions; empty optional fields are left out."""
    page.open(f"{server.url}/ui#/tools/plan")
    page.type("[data-field=title] textarea", "Trip")
    page.type("[data-field=rounds] input", "5")
    page.choose("[data-field=loud] select", "0")
    page.choose("[data-field=colour] select", "2")
    page.click("[data-field=stops] button", "Add")
    page.type("[data-field=stops] li textarea", "Oslo")
    page.type("[data-field=place] [data-field=city] textarea", "Rome")
    page.choose("[data-field=who] select.which", "1")
    page.type("[data-field=who] .grow input", "12")
    page.click("[data-field=tree] button", "Add")
    page.type("[data-field=tree] [data-field=name] textarea", "root")
    page.type("[data-field=free] textarea", '{"any": [1]}')
    page.click("button", "Call")
    page.sees("Trip", ".result pre")
    assert json.loads(page.text(".result pre")) == {
        "title": "Trip",
        "rounds": 5,
        "loud": True,
        "colour": 7,
        "stops": ["Oslo"],
        "place": {"city": "Rome"},
        "tree": {"name": "root"},
        "who": 12,
        "free": {"any": [1]},
    }


def test_calls_view_shows_running_and_finished_calls(page: Page, server: LiveServer, slow: BlockingTool) -> None:
    page.open(f"{server.url}/ui#/calls")
    page.sees("live", "[role=status]:not(#health)")
    slow.go.clear()
    caller = threading.Thread(target=make_calls, args=(server, ("wait", {})))
    caller.start()
    page.until("document.querySelector('.running')?.innerText.includes('wait')")
    slow.go.set()
    page.until("[...document.querySelectorAll('.calls tr.pick')].some(row => row.innerText.includes('wait'))")
    page.until("!document.querySelector('.running')")
    page.click(".calls tr.pick", "wait")
    page.sees("done", ".calls .more")
    caller.join(20)


def test_hostile_text_is_shown_but_never_executed(page: Page, server: LiveServer) -> None:
    make_calls(server, ("hostile", {"text": HOSTILE}), (HOSTILE, {}), task=HOSTILE)
    for view, shown in (("tools/hostile", HOSTILE), ("calls", "onerror")):
        page.open(f"{server.url}/ui#/{view}")
        page.sees(shown, "main")
        if view == "tools/hostile":
            page.type("[data-field=text] textarea", HOSTILE)
            page.click("button", "Call")
            page.sees(HOSTILE, ".result pre")
        assert page.js("document.title").endswith("mtrl gateway")
        assert page.count("main script, main img[src=x], [onerror]") == 0


def test_token_is_prompted_once_and_stored_for_the_tab(page: Page) -> None:
    page.allow("401")
    with live_server(lambda: sample_gateway(BlockingTool()), Settings(port=0, token=SecretStr("let-me-in"))) as locked:
        page.open(f"{locked.url}/ui")
        page.type("#token", "wrong")
        page.press("Enter")
        page.sees("That token is wrong", "dialog")
        assert "far" not in page.text("main")
        page.type("#token", "let-me-in")
        page.press("Enter")
        page.sees("far", "main")
        page.open(f"{locked.url}/ui#/calls")
        page.sees("live", "main")
        assert page.js("sessionStorage.getItem('mtrl-token')") == "let-me-in"
        assert page.js("localStorage.length") == 0 and page.count("dialog") == 0
