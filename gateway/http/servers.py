"""The servers behind a gateway, as their sources tell of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gateway.http.hosted import Hosted


class ServerState(Protocol):
    """What a source tells of the server behind it."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def remedy(self) -> str: ...

    @property
    def tools(self) -> int: ...

    @property
    def quarantined(self) -> Mapping[str, str]: ...


def states(gateway: Hosted) -> list[ServerState]:
    """Of the sources that stand on a server."""
    told = (getattr(source.leaf, "status", None) for source in gateway.sources)
    return [state for state in told if state is not None]
