"""Signs of life for sandboxes on other machines: a thread for each server renews the leases of all that are there.

They are threads, so that a busy event loop loses no sandbox. A server that hangs keeps no other one waiting.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

import httpx2

BEAT_S = 10.0
BEATS_PER_LEASE = 4


@cache
def make_tls() -> ssl.SSLContext:
    """One for all clients of servers: each would read all certificates, for which the event loop is held."""
    return ssl.create_default_context()


class Heartbeats:
    """All sandboxes on other machines that this process uses, by server."""

    def __init__(self) -> None:
        self._servers: dict[str, set[str]] = {}
        self._changed = threading.Condition()

    def add(self, url: str, headers: Mapping[str, str], lease_s: float) -> None:
        """Begins to renew the lease of a sandbox."""
        server, _, id = url.rpartition("/")
        with self._changed:
            if server not in self._servers:
                ids = self._servers[server] = set[str]()
                given = (server, ids, headers, lease_s / BEATS_PER_LEASE)
                threading.Thread(target=self._run, args=given, name="heartbeats", daemon=True).start()
            self._servers[server].add(id)

    def remove(self, url: str) -> None:
        """Ends it."""
        server, _, id = url.rpartition("/")
        with self._changed:
            ids = self._servers.get(server, set())
            ids.discard(id)
            if not ids:
                self._servers.pop(server, None)
                self._changed.notify_all()

    def _run(self, server: str, ids: set[str], headers: Mapping[str, str], pause_s: float) -> None:
        with httpx2.Client(timeout=BEAT_S, trust_env=False, verify=make_tls()) as http:
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda: self._servers.get(server) is not ids, pause_s):
                        return
                    renewed = sorted(ids)
                with suppress(httpx2.HTTPError):  # The next request tells what is wrong.
                    http.post(f"{server}/renew", json={"ids": renewed}, headers=headers)


HEARTBEATS = Heartbeats()
