"""The leases of remote sandboxes are renewed together, by a thread for each server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mtrl_plugins.sandboxes import heartbeats
from mtrl_plugins.sandboxes.heartbeats import Heartbeats
from tests.servers.serve_app import serve_app
from tests.waiting import PATIENCE_S, wait_until

SHORT_S = 0.4


class RecordingServer:
    """Records whose leases are renewed, and answers no request before it is released."""

    def __init__(self, url: str) -> None:
        self.url, self.renewed = url, list[list[str]]()
        self.tokens: list[str | None] = []
        self.statuses: list[int] = []
        """Of the next answers."""
        self.released = threading.Event()


@contextmanager
def recording_server() -> Iterator[RecordingServer]:
    async def record(request: Request) -> Response:
        body = await request.json()
        server.tokens.append(request.headers.get("authorization"))
        server.renewed.append(body["ids"] if request.url.path == "/sandboxes/renew" else [])
        await to_thread.run_sync(server.released.wait, PATIENCE_S)
        return Response(status_code=server.statuses.pop(0) if server.statuses else 200)

    with serve_app(Route("/{path:path}", record, methods=["POST"])) as origin:
        server = RecordingServer(f"{origin}/sandboxes")
        try:
            yield server
        finally:
            server.released.set()


def test_all_leases_of_a_server_are_renewed_and_a_server_that_hangs_delays_no_other() -> None:
    beats = Heartbeats()
    with recording_server() as hung, recording_server() as healthy:
        healthy.released.set()
        beats.add(f"{hung.url}/h", {}, SHORT_S)
        anyio.run(wait_until, lambda: hung.renewed)
        for name in ("a", "b"):
            beats.add(f"{healthy.url}/{name}", {}, SHORT_S)
        anyio.run(wait_until, lambda: healthy.renewed.count(["a", "b"]) > 3)
        beats.remove(f"{healthy.url}/a")
        anyio.run(wait_until, lambda: healthy.renewed.count(["b"]) > 1)
        assert all(ids == ["h"] for ids in hung.renewed)
        hung.released.set()
        for url in (f"{healthy.url}/b", f"{hung.url}/h"):
            beats.remove(url)
        anyio.run(wait_until, lambda: not any(thread.name == "heartbeats" for thread in threading.enumerate()))
        beats.add(f"{hung.url}/later", {}, SHORT_S)
        anyio.run(wait_until, lambda: ["later"] in hung.renewed)
        beats.remove(f"{hung.url}/later")


def test_thread_whose_last_sandbox_goes_as_a_beat_is_due_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    beats, url = Heartbeats(), "http://127.0.0.1:9/sandboxes/a"

    def wait(_: float) -> bool:
        beats.remove(url)
        return False

    monkeypatch.setattr(beats._changed, "wait", wait)
    beats.add(url, {}, SHORT_S)
    anyio.run(wait_until, lambda: not any(thread.name == "heartbeats" for thread in threading.enumerate()))


def test_server_that_was_started_again_with_shorter_leases_and_another_token_is_renewed_as_it_now_asks() -> None:
    beats = Heartbeats()
    with recording_server() as server:
        server.released.set()
        beats.add(f"{server.url}/long", {"authorization": "old"}, 4 * PATIENCE_S)
        beats.add(f"{server.url}/short", {"authorization": "new"}, SHORT_S)
        anyio.run(wait_until, lambda: server.renewed.count(["long", "short"]) > 2)
        assert {*server.tokens} == {"new"}
        beats.remove(f"{server.url}/short")
        beats.remove(f"{server.url}/long")
        anyio.run(wait_until, lambda: not any(thread.name == "heartbeats" for thread in threading.enumerate()))


def test_lost_beat_is_repeated_well_before_the_leases_end_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeats, "RETRY_S", 0.01)
    beats = Heartbeats()
    with recording_server() as server:
        server.released.set()
        server.statuses = [503, 503]
        beats.add(f"{server.url}/a", {}, 4 * SHORT_S)
        anyio.run(wait_until, lambda: server.renewed == [["a"]] * 3)
        beats.remove(f"{server.url}/a")
    (told,) = caplog.messages
    assert "does not renew the leases of its sandboxes (1 here)" in told and "503" in told
