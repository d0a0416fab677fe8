"""When a session was last used: one whose program died sends nothing more, and does not say so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class SessionUse:
    """The requests of one session: it is idle while none is under way."""

    def __init__(self) -> None:
        self._under_way = 0
        self._ended_at = time.monotonic()
        self.abandoned = False
        """Whether the session was ended because it was idle for too long."""

    @property
    def idle_s(self) -> float:
        """For how long there was no request; 0 while one is under way."""
        return 0.0 if self._under_way else time.monotonic() - self._ended_at

    def touch(self) -> None:
        """Notes a request that is over at once."""
        self._ended_at = time.monotonic()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """A block in which a request is answered."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self.touch()

    def remaining_s(self, limit_s: float) -> float:
        """Seconds until the session was idle for so long, if nothing comes; 0 if it was."""
        return max(0.0, limit_s - self.idle_s)
