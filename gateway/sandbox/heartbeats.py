"""Signs of life for sandboxes on other machines: threads renew their leases, a few at a time for each server.

They are threads, so that a busy event loop loses no sandbox. A server that hangs keeps no other one waiting.
"""

from __future__ import annotations

import heapq
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import httpx2

BEAT_S = 10.0
BEATS_PER_LEASE = 4
AT_ONCE = 8
"""Requests to one server that are under way at a time."""


@cache
def make_tls() -> ssl.SSLContext:
    """One for all clients of servers: each would read all certificates, for which the event loop is held."""
    return ssl.create_default_context()


@dataclass(order=True, slots=True)
class _Beat:
    """When the lease of a sandbox is renewed next."""

    due: float
    url: str
    headers: Mapping[str, str] = field(compare=False)
    pause_s: float = field(compare=False)


class ServerHeartbeats:
    """The sandboxes of one server, with the threads that renew their leases while there are any."""

    def __init__(self) -> None:
        self._beats: dict[str, _Beat] = {}
        self._waiting: list[_Beat] = []
        """A heap: what is due first, with entries of sandboxes that are gone by now."""
        self._changed = threading.Condition()
        self._threads = 0
        self._http: httpx2.Client | None = None

    def add(self, url: str, headers: Mapping[str, str], lease_s: float) -> None:
        """Begins to renew the lease of a sandbox."""
        pause_s = lease_s / BEATS_PER_LEASE
        with self._changed:
            beat = self._beats[url] = _Beat(time.monotonic() + pause_s, url, headers, pause_s)
            self._wait_for(beat)
            if self._threads < min(AT_ONCE, len(self._beats)):
                self._http = self._http or httpx2.Client(timeout=BEAT_S, trust_env=False, verify=make_tls())
                self._threads += 1
                threading.Thread(target=self._run, args=(self._http,), name="heartbeats", daemon=True).start()

    def remove(self, url: str) -> None:
        """Ends it."""
        with self._changed:
            self._beats.pop(url, None)
            if not self._beats:
                self._waiting.clear()
                self._changed.notify_all()

    def _run(self, http: httpx2.Client) -> None:
        while (beat := self._take()) is not None:
            with suppress(httpx2.HTTPError):  # The next request tells what is wrong.
                http.get(beat.url, headers=beat.headers)
            with self._changed:
                if self._beats.get(beat.url) is beat:
                    beat.due = time.monotonic() + beat.pause_s
                    self._wait_for(beat)

    def _wait_for(self, beat: _Beat) -> None:
        heapq.heappush(self._waiting, beat)
        if self._waiting[0] is beat:
            self._changed.notify()

    def _take(self) -> _Beat | None:
        """Waits for the next sandbox that is due; None when there are no more."""
        with self._changed:
            while self._beats:
                while self._waiting and self._beats.get(self._waiting[0].url) is not self._waiting[0]:
                    heapq.heappop(self._waiting)
                left_s = self._waiting[0].due - time.monotonic() if self._waiting else None
                if left_s is not None and left_s <= 0:
                    return heapq.heappop(self._waiting)
                self._changed.wait(left_s)
            self._threads -= 1
            if self._threads == 0 and self._http is not None:
                self._http.close()
                self._http = None
            return None


class Heartbeats:
    """All sandboxes on other machines that this process uses."""

    def __init__(self) -> None:
        self._servers: dict[str, ServerHeartbeats] = {}
        self._lock = threading.Lock()

    def add(self, url: str, headers: Mapping[str, str], lease_s: float) -> None:
        """Begins to renew the lease of a sandbox."""
        self._server(url).add(url, headers, lease_s)

    def remove(self, url: str) -> None:
        """Ends it."""
        self._server(url).remove(url)

    def _server(self, url: str) -> ServerHeartbeats:
        with self._lock:
            return self._servers.setdefault(url.rpartition("/")[0], ServerHeartbeats())


HEARTBEATS = Heartbeats()
