"""Signs of life for sandboxes on other machines: a thread for each server renews the leases of all that are there.

They are threads, so that a busy event loop loses no sandbox. A server that hangs keeps no other one waiting.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import httpx2

BEAT_S = 10.0
BEATS_PER_LEASE = 4


@cache
def make_tls() -> ssl.SSLContext:
    """One for all clients of servers: each would read all certificates, for which the event loop is held."""
    return ssl.create_default_context()


@dataclass
class _Server:
    """The leases of one server, by sandbox: a server that was started again may give others."""

    leases_s: dict[str, float]
    headers: Mapping[str, str]
    """Those of the newest sandbox, whose token is the server's now."""


class Heartbeats:
    """All sandboxes on other machines that this process uses, by server."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        self._changed = threading.Condition()

    def add(self, url: str, headers: Mapping[str, str], lease_s: float) -> None:
        """Begins to renew the lease of a sandbox."""
        address, _, id = url.rpartition("/")
        with self._changed:
            if address not in self._servers:
                server = self._servers[address] = _Server({}, headers)
                args = (address, server)
                threading.Thread(target=self._run, args=args, name="heartbeats", daemon=True).start()
            server = self._servers[address]
            server.headers = headers
            is_shorter = lease_s < min(server.leases_s.values(), default=lease_s)
            server.leases_s[id] = lease_s
            if is_shorter:
                self._changed.notify_all()

    def remove(self, url: str) -> None:
        """Ends it."""
        address, _, id = url.rpartition("/")
        with self._changed:
            if (server := self._servers.get(address)) is not None:
                server.leases_s.pop(id, None)
                if not server.leases_s:
                    del self._servers[address]
                    self._changed.notify_all()

    def _run(self, address: str, server: _Server) -> None:
        with httpx2.Client(timeout=BEAT_S, trust_env=False, verify=make_tls()) as http:
            while True:
                renewed_at = time.monotonic()
                with self._changed:
                    while self._servers.get(address) is server:
                        due = renewed_at + min(server.leases_s.values()) / BEATS_PER_LEASE
                        if not self._changed.wait(max(0.0, due - time.monotonic())):
                            break
                    else:
                        return
                    ids, headers = sorted(server.leases_s), server.headers
                with suppress(httpx2.HTTPError):  # The next request tells what is wrong.
                    http.post(f"{address}/renew", json={"ids": ids}, headers=headers)


HEARTBEATS = Heartbeats()
