"""What servers can share, they share: one pool of HTTP connections, one reaper, one cap on children."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import anyio

from gateway.upstream.reaper import Reaper
from gateway.upstream.web import Web


@dataclass
class Services:
    """Entered before the first server of a gateway, left after the last."""

    children: int = 512
    """Child processes of all servers together, at the most."""
    web: Web = field(default_factory=Web)
    reaper: Reaper = field(default_factory=Reaper)

    def __post_init__(self) -> None:
        self.places = anyio.Semaphore(self.children)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.reaper.stop()
        await self.web.aclose()
