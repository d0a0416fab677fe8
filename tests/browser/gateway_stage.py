"""The gateway's web UI with this repository's own tools after some calls, for screenshots."""

from __future__ import annotations

import json
import os
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.gateway import Gateway
from gateway.http.settings import Settings
from tests.browser.page import Page
from tests.browser.views import Stage, View
from tests.live_server import live_server

ROOT = Path(__file__).parents[2]
START_S = 60


@contextmanager
def _serve() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, _in_repository_root():
        servers = Path(folder) / "mcp_servers.json"
        written = json.loads((ROOT / servers.name).read_text(encoding="utf-8").replace('"."', json.dumps(str(ROOT))))
        del written["mcpServers"]["atlas"]["disabled"]  # So that one is down.
        servers.write_text(json.dumps(written), encoding="utf-8")

        def make() -> Gateway:
            return Gateway.load(ROOT / "tool_configs", servers)

        with live_server(make, Settings(port=0)) as at:
            _make_sample_calls(at.url)
            yield at.url


@contextmanager
def _in_repository_root() -> Iterator[None]:
    """Changes to the repository's root, to which the paths in the servers file are relative."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


def _make_sample_calls(url: str) -> None:
    """Makes calls like a rollout, including invalid ones."""
    session_request = {
        "task_id": "train-812",
        "tools": ["add", "calculate", "write_note", "read_notes"],
        "feedback": "gsm8k",
    }
    id = post_json(f"{url}/v1/sessions", session_request | {"feedback_args": {"ground_truth": "7"}})["id"]
    for round in range(6):
        _call(url, id, "calculate", {"expression": f"{round} * 17 + 4"})
        _call(url, id, "add", {"a": round, "b": 2})
    _call(url, id, "add", {"a": "three"})
    _call(url, id, "calculate", {"expression": "7 / 0"})
    _call(url, id, "calculate", "{'expression': '3 + 4'}")
    _call(url, id, "write_note", {"text": "Leo lives in Oslo."})
    _call(url, id, "multiply", {"a": 3, "b": 4})
    feedback_request = {"messages": [{"role": "assistant", "content": "It is #### 7"}]}
    post_json(f"{url}/v1/sessions/{id}/feedback", feedback_request)
    other = post_json(f"{url}/v1/sessions", {"task_id": "train-813", "tools": ["draw_bars", "calculate"]})["id"]
    _call(url, other, "draw_bars", {"values": [3, 1, 2], "labels": ["a", "b", "c"]})
    _call(url, other, "draw_bars", {"values": []})
    _call(url, other, "calculate", {"expression": "sum([1, 2])"})


def _call(url: str, id: str, name: str, arguments: Any) -> None:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": written}}
    post_json(f"{url}/v1/sessions/{id}/calls", {"tool_calls": [call]})


def post_json(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.load(answer)


def _show_overview(page: Page, url: str) -> None:
    page.open(f"{url}/ui")
    page.sees("start it: python tool_configs/servers/atlas.py")
    page.until("document.querySelector('.shares')")


def _show_tool_result(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/tools/draw_bars")
    for place, value in enumerate(("3", "1", "4")):
        if place:
            page.click("[data-field=values] button", "Add")
        page.type(f"[data-field=values] li:nth-child({place + 1}) input", value)
    page.click("button.first")
    page.until("document.querySelector('.result img')?.complete")


def _show_tools(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/tools")
    page.until("document.querySelectorAll('.group').length > 3")
    page.type("#search", "note")


def _show_server(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/servers/notebook")
    page.sees("Standard error")
    page.click("button", "Restart")
    page.click("button", "Really restart")
    page.sees("It is up again.")


def _show_down_server(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/servers/atlas")
    page.sees("start it: python tool_configs/servers/atlas.py")


def _show_calls(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/calls")
    page.sees("draw_bars")
    page.click("tr.pick", "7 / 0")
    page.sees("division by zero")


GATEWAY = Stage(
    _serve,
    (
        View("gateway", _show_overview, in_docs=True),
        View("gateway-tool", _show_tool_result, size=(1280, 1010)),
        View("gateway-tools", _show_tools),
        View("gateway-server", _show_server),
        View("gateway-server-down", _show_down_server),
        View("gateway-calls", _show_calls),
    ),
)
