"""The gateway's page in a real browser: what is wrong is said, tools can be tried, and nothing that is shown is run."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.http.settings import Settings
from gateway.tape import recorded
from tests.browser.page import NARROW, Page
from tests.browser.reads import faint, nameless, wider
from tests.browser.workshop import HOSTILE, REMEDY, Slow, workshop
from tests.served import Served, serving


@pytest.fixture(scope="module")
def slow() -> Slow:
    return Slow()


@pytest.fixture(scope="module")
def tapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tapes")


@pytest.fixture(scope="module")
def at(slow: Slow, tapes: Path) -> Iterator[Served]:
    settings = Settings(port=0, tapes=tapes)
    with serving(lambda: recorded(workshop(slow), tapes / "first"), settings) as served:
        yield served


def post(url: str, body: Any) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=20) as answer:
        return json.load(answer)


def rollout(at: Served, *calls: tuple[str, Any], task: str = "task-7") -> str:
    """A session that another client has opened, and what it has called."""
    id = str(post(f"{at.url}/v1/sessions", {"task_id": task})["id"])
    for name, arguments in calls:
        function = {"name": name, "arguments": json.dumps(arguments)}
        post(f"{at.url}/v1/sessions/{id}/calls", {"tool_calls": [{"id": "1", "function": function}]})
    return id


def test_a_server_that_is_down_shows_its_reason_and_its_remedy(page: Page, at: Served) -> None:
    page.open(f"{at.url}/ui")
    page.sees("cannot connect", ".server[data-state=down]")
    page.sees(f"start it: {REMEDY}", ".server[data-state=down]")
    page.sees("1 server down", "#health")


def test_what_tools_have_done_is_told_by_tool(page: Page, at: Served) -> None:
    rollout(at, ("add", {"a": 1}), ("add", {"a": "x"}))
    page.open(f"{at.url}/ui")
    page.until("document.querySelector('.shares[aria-label*=invalid]')")
    assert "ok" in page.js("document.querySelector('.shares[aria-label*=invalid]').ariaLabel")
    assert page.count("svg.bins rect") >= 1


def test_a_tool_is_found_read_and_tried_through_its_form(page: Page, at: Served) -> None:
    page.open(f"{at.url}/ui#/tools")
    page.type("#search", "two numbers pure")
    page.until("document.querySelectorAll('.item').length === 1")
    page.click(".item", "pure_add")
    page.sees("the first", ".schema")
    page.type("[data-field=a] input", "40")
    page.type("[data-field=b] input", "2")
    page.click("button", "Call")
    page.sees("42", ".result pre")
    assert page.text(".result .chip") == "ok"


def test_a_form_says_what_its_schema_says(page: Page, at: Served) -> None:
    """Strings, numbers, booleans, lists, objects, references, choices: and what nobody filled in is left out."""
    page.open(f"{at.url}/ui#/tools/plan")
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


def test_arguments_can_be_written_as_json_and_go_back_into_the_form(page: Page, at: Served) -> None:
    page.open(f"{at.url}/ui#/tools/add")
    page.type("[data-field=a] input", "1")
    page.click("label", "JSON")
    assert json.loads(page.js("document.querySelector('.raw').value")) == {"a": 1}
    page.type(".raw", '{"a": 3, "b": 4}')
    page.click("label", "Form")
    page.until("document.querySelector('[data-field=b] input')?.value === '4'")
    page.click("label", "JSON")
    page.type(".raw", "{'a': 3}")
    page.click("button", "Call")
    page.sees("invalid", ".result .chip")  # malformed, as a policy might write it, and judged as a policy's


def test_a_number_that_is_none_is_said_at_its_field(page: Page, at: Served) -> None:
    page.open(f"{at.url}/ui#/tools/add")
    page.type("[data-field=a] input", "one")
    page.click("button", "Call")
    page.sees("a is not a number.", "[role=alert]")
    assert page.js("document.activeElement.ariaInvalid") == "true"


def test_all_parts_of_a_result_are_shown(page: Page, at: Served) -> None:
    page.open(f"{at.url}/ui#/tools/several")
    page.click("button", "Call")
    page.until("document.querySelector('.result img')?.naturalWidth > 0")
    shown = page.text(".result")
    assert shown.index("before") < shown.index("between") < shown.index("after ✓")
    assert "audio/wav" in shown and "a note" in shown and "https://example.org/far" in shown


def test_an_error_says_what_it_means_and_why(page: Page, at: Served) -> None:
    page.open(f"{at.url}/ui#/tools/fails")
    page.click("button", "Call")
    page.sees("The tool itself said no.", ".result")
    assert "no such luck" in page.text(".result")


def test_the_equivalent_curl_is_shown_and_names_no_token(page: Page, at: Served) -> None:
    page.open(f"{at.url}/ui#/tools/add")
    page.type("[data-field=a] input", "1")
    page.click("summary", "curl")
    page.sees("/v1/sessions/$id/calls", "form pre")
    assert '\\"a\\":1' in page.text("form pre")


def test_calls_appear_as_they_run_and_end(page: Page, at: Served, slow: Slow) -> None:
    page.open(f"{at.url}/ui#/calls")
    page.sees("live", "[role=status]:not(#health)")
    slow.go.clear()
    caller = threading.Thread(target=rollout, args=(at, ("wait", {})))
    caller.start()
    page.until("document.querySelector('.running')?.innerText.includes('wait')")
    slow.go.set()
    page.until("[...document.querySelectorAll('.calls tr[tabindex]')].some(row => row.innerText.includes('wait'))")
    page.until("!document.querySelector('.running')")
    page.click(".calls tr[tabindex]", "wait")
    page.sees("done", ".calls .more")
    caller.join(20)


def test_calls_are_filtered_and_opened_by_keyboard(page: Page, at: Served) -> None:
    rollout(at, ("add", {"a": 3141}), ("fails", {}))
    page.open(f"{at.url}/ui#/calls")
    page.sees('"a": 3141')
    page.press("/")
    page.type("#search", "add 3141")
    page.until("document.querySelectorAll('.calls tr[tabindex]').length === 1")
    page.press("Escape")
    page.press("j")
    page.press("Enter")
    page.sees("3141", ".calls .more pre")


def test_a_session_is_seen_and_closed_by_whoever_runs_the_gateway(page: Page, at: Served) -> None:
    id = rollout(at, ("add", {"a": 1}), task="stuck-1")
    page.open(f"{at.url}/ui#/sessions")
    page.sees("stuck-1")
    assert id not in page.js("document.documentElement.outerHTML")  # it would open the session
    row = "[...document.querySelectorAll('tbody tr')].find(row => row.innerText.includes('stuck-1'))"
    page.js(f"{row}.querySelector('button').id = 'shut'")
    page.click("#shut")
    page.sees("Really close", "#shut")
    page.click("#shut")
    page.until(f"!{row}")
    assert id not in at.gateway.sessions


def test_a_tape_shows_what_is_on_it(page: Page, at: Served) -> None:
    rollout(at, ("facts", {}), task="taped")
    page.open(f"{at.url}/ui#/tapes")
    page.click(".item", "first")
    page.click("summary", "taped")
    page.sees("facts", "details[open] .turn")


@pytest.mark.parametrize("view", ["#/", "#/tools/hostile", "#/calls", "#/sessions", "#/tapes/first"])
def test_hostile_text_is_shown_and_never_run(page: Page, at: Served, view: str) -> None:
    rollout(at, ("hostile", {"text": HOSTILE}), (HOSTILE, {}), task=HOSTILE)
    page.open(f"{at.url}/ui{view}")
    page.until("document.querySelector('main').innerText.length > 40")
    if view == "#/tools/hostile":
        page.type("[data-field=text] textarea", HOSTILE)
        page.click("button", "Call")
        page.sees(HOSTILE, ".result pre")
        assert HOSTILE in page.text(".description")
    if view in ("#/calls", "#/sessions"):
        page.sees("onerror")
    assert page.js("document.title").endswith("mtrl gateway")
    assert page.count("main script, main img[src=x], [onerror]") == 0


def test_a_page_that_makes_markup_of_text_is_stopped_by_its_policy(page: Page, at: Served) -> None:
    page.allow("TrustedHTML|Content Security Policy|trusted type")
    page.open(f"{at.url}/ui")
    page.js(
        "(() => { try { document.querySelector('main').innerHTML = '<b>x</b>' } catch { window.stopped = true } })()"
    )
    assert page.js("window.stopped") is True


@pytest.mark.parametrize("view", ["#/", "#/tools/plan", "#/calls", "#/sessions", "#/tapes/first"])
def test_a_view_is_readable_in_light_and_dark_and_at_400_pixels(page: Page, at: Served, view: str) -> None:
    rollout(at, ("add", {"a": 1}), ("fails", {}), ("add", {"a": "x" * 200}))
    page.look("light", NARROW)
    page.open(f"{at.url}/ui{view}")
    page.until("document.querySelector('main').innerText.length > 40")
    assert wider(page) == []
    assert nameless(page) == []
    assert faint(page) == []
    page.look("dark", NARROW)
    assert faint(page) == []


def test_the_number_keys_change_the_view_but_not_while_something_is_written(page: Page, at: Served) -> None:
    page.open(f"{at.url}/ui")
    page.press("2")
    page.until("document.querySelector('#search')")
    page.press("/")
    page.press("3")
    assert page.js("document.querySelector('#search').value") == "3"
    page.press("Escape")
    page.press("4")
    page.sees("Open sessions")


def test_a_token_is_asked_for_once_and_kept_for_the_tab(page: Page) -> None:
    page.allow("401")
    with serving(lambda: workshop(Slow()), Settings(port=0, token=SecretStr("let-me-in"))) as locked:
        page.open(f"{locked.url}/ui")
        page.type("#token", "wrong")
        page.press("Enter")
        page.sees("not the right one", "dialog")
        assert "far" not in page.text("main")
        page.type("#token", "let-me-in")
        page.press("Enter")
        page.sees("far", "main")
        page.open(f"{locked.url}/ui#/calls")
        page.sees("live", "main")
        assert page.js("sessionStorage.getItem('mtrl-token')") == "let-me-in"
        assert page.js("localStorage.length") == 0 and page.count("dialog") == 0


def test_a_gateway_that_has_ended_is_said_so(page: Page) -> None:
    page.allow("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET")
    with serving(lambda: workshop(Slow())) as ended:
        page.open(f"{ended.url}/ui#/calls")
        page.sees("live", "main")
    page.sees("does not answer", "#health")
