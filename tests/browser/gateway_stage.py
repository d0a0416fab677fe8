"""The gateway's page over this repository's own tools, after a few calls of every kind."""

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
from gateway.tape import recorded
from tests.browser.page import NARROW, Page
from tests.browser.views import Stage, View
from tests.served import serving

ROOT = Path(__file__).parents[2]
START_S = 60


@contextmanager
def _serve() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, _at_home():
        tape = Path(folder) / "gsm8k-monday"

        def make() -> Gateway:
            return recorded(Gateway.load(ROOT / "tool_configs", ROOT / "mcp_servers.json"), tape)

        with serving(make, Settings(port=0, tapes=Path(folder))) as at:
            _use(at.url)
            yield at.url


@contextmanager
def _at_home() -> Iterator[None]:
    """The servers of the file are named from the root of the repository."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


def _use(url: str) -> None:
    """What a rollout would do, its mistakes included."""
    asked = {"task_id": "train-812", "tools": ["add", "calculate", "write_note", "read_notes"], "feedback": "gsm8k"}
    id = _post(f"{url}/v1/sessions", asked | {"feedback_args": {"ground_truth": "7"}})["id"]
    for round in range(6):
        _call(url, id, "calculate", {"expression": f"{round} * 17 + 4"})
        _call(url, id, "add", {"a": round, "b": 2})
    _call(url, id, "add", {"a": "three"})
    _call(url, id, "calculate", {"expression": "7 / 0"})
    _call(url, id, "calculate", "{'expression': '3 + 4'}")
    _call(url, id, "write_note", {"text": "Leo lives in Oslo."})
    _call(url, id, "multiply", {"a": 3, "b": 4})
    said = {"messages": [{"role": "assistant", "content": "It is #### 7"}]}
    _post(f"{url}/v1/sessions/{id}/feedback", said)
    other = _post(f"{url}/v1/sessions", {"task_id": "train-813", "tools": ["draw_bars", "calculate"]})["id"]
    _call(url, other, "draw_bars", {"values": [3, 1, 2], "labels": ["a", "b", "c"]})
    _call(url, other, "draw_bars", {"values": []})
    _call(url, other, "calculate", {"expression": "sum([1, 2])"})


def _call(url: str, id: str, name: str, arguments: Any) -> None:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": written}}
    _post(f"{url}/v1/sessions/{id}/calls", {"tool_calls": [call]})


def _post(url: str, body: Any) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=START_S) as answer:
        return json.load(answer)


def _overview(page: Page, url: str) -> None:
    page.open(f"{url}/ui")
    page.sees("start it: python tool_configs/servers/atlas.py")
    page.until("document.querySelector('.bins')")


def _tried(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/tools/draw_bars")
    for place, value in enumerate(("3", "1", "4")):
        if place:
            page.click("[data-field=values] button", "Add")
        page.type(f"[data-field=values] li:nth-child({place + 1}) input", value)
    page.click("button.first")
    page.until("document.querySelector('.result img')?.complete")


def _calls(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/calls")
    page.sees("draw_bars")
    page.click("tr[tabindex]", "7 / 0")
    page.sees("For the operator")


def _sessions(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/sessions")
    page.sees("train-812")


def _tape(page: Page, url: str) -> None:
    page.open(f"{url}/ui#/tapes/gsm8k-monday")
    page.click("summary", "train-812")
    page.sees("Leo lives in Oslo.")


GATEWAY = Stage(
    _serve,
    (
        View("gateway", _overview, kept=True),
        View("gateway-tool", _tried, size=(1280, 1010), kept=True),
        View("gateway-calls", _calls),
        View("gateway-sessions", _sessions),
        View("gateway-tape", _tape),
        View("gateway-narrow", _tried, size=NARROW),
    ),
)
