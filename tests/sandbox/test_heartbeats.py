"""The leases of remote sandboxes are renewed a few at a time, each when it is due."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio

from gateway.sandbox.heartbeats import AT_ONCE, Heartbeats
from tests.waiting import PATIENCE_S, wait_until

LONG_S, SHORT_S = 3600.0, 0.04


class CountingServer:
    """Counts signs of life, and answers none before it is released."""

    def __init__(self, url: str) -> None:
        self.url, self.counts = url, Counter[str]()
        self.now = self.most = 0
        self.released = threading.Event()
        self._lock = threading.Lock()

    def answer(self, path: str) -> None:
        with self._lock:
            self.counts[path] += 1
            self.now += 1
            self.most = max(self.most, self.now)
        self.released.wait(PATIENCE_S)
        with self._lock:
            self.now -= 1


@contextmanager
def counting_server() -> Iterator[CountingServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            counting.answer(self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        counting = CountingServer(f"http://127.0.0.1:{http.server_port}")
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield counting
        finally:
            counting.released.set()
            http.shutdown()
            thread.join()


def test_leases_are_renewed_at_once_up_to_a_bound_and_a_server_that_hangs_delays_no_other() -> None:
    beats = Heartbeats()
    with counting_server() as hung, counting_server() as healthy:
        healthy.released.set()
        for number in range(3 * AT_ONCE):
            beats.add(f"{hung.url}/{number}", {}, SHORT_S)
        anyio.run(wait_until, lambda: hung.now == AT_ONCE)
        beats.add(f"{healthy.url}/a", {}, SHORT_S)
        anyio.run(wait_until, lambda: healthy.counts["/a"] > 3)
        assert hung.most == AT_ONCE
        hung.released.set()
        anyio.run(wait_until, lambda: min(hung.counts[f"/{number}"] for number in range(3 * AT_ONCE)) > 1)
        for number in range(3 * AT_ONCE):
            beats.remove(f"{hung.url}/{number}")
        beats.remove(f"{healthy.url}/a")
        anyio.run(wait_until, lambda: not any(thread.name == "heartbeats" for thread in threading.enumerate()))


def test_sandboxes_that_come_and_go_renew_no_lease_but_their_own() -> None:
    beats = Heartbeats()
    with counting_server() as server:
        server.released.set()
        for number in range(50):
            beats.add(f"{server.url}/{number}", {}, LONG_S)
        beats.add(f"{server.url}/due", {}, SHORT_S)
        anyio.run(wait_until, lambda: server.counts["/due"] > 2)
        assert server.counts.keys() == {"/due"}
        for name in (*range(50), "due"):
            beats.remove(f"{server.url}/{name}")
