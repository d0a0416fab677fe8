"""Signs of life for sandboxes on other machines: a thread for each server renews the leases of all that are there.

They are threads, so that a busy event loop loses no sandbox. A server that hangs keeps no other one waiting.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import httpx2

log = logging.getLogger(__name__)

BEAT_S = 10.0
BEATS_PER_LEASE = 4
RETRY_S = 0.5
"""Between tries where a beat failed: the leases of all sandboxes of a server hang on it."""


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
    is_failing: bool = False
    """Told once, until a beat succeeds again."""

    @property
    def pause_s(self) -> float:
        """The time between two beats."""
        return min(self.leases_s.values()) / BEATS_PER_LEASE


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
                server = _Server({id: lease_s}, headers)
                args = (address, server)
                threading.Thread(target=self._run, args=args, name="heartbeats", daemon=True).start()
                self._servers[address] = server  # Which the thread looks at only after this block.
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
        with httpx2.Client(trust_env=False, verify=make_tls()) as http:
            while True:
                renewed_at = time.monotonic()
                with self._changed:
                    while True:
                        if self._servers.get(address) is not server:  # Also where that came while a wait ended.
                            return
                        due = renewed_at + (RETRY_S if server.is_failing else server.pause_s)
                        if (left := due - time.monotonic()) <= 0:
                            break
                        self._changed.wait(left)
                    ids, headers, pause_s = sorted(server.leases_s), server.headers, server.pause_s
                try:
                    beat = http.post(
                        f"{address}/renew", json={"ids": ids}, headers=headers, timeout=min(BEAT_S, pause_s)
                    )
                    beat.raise_for_status()
                    server.is_failing = False
                except httpx2.HTTPError as error:
                    if not server.is_failing:
                        log.warning(
                            "%s does not renew the leases of its sandboxes (%d here): %s", address, len(ids), error
                        )
                    server.is_failing = True


HEARTBEATS = Heartbeats()
