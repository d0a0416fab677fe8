"""What a person who runs the gateway wants to know of one server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gateway.types import EMPTY

State = Literal["up", "connecting", "down", "stale"]


@dataclass(frozen=True)
class ServerStatus:
    """How one server is. `stale`: it is down, and what it last listed is still offered."""

    name: str
    state: State
    reason: str = ""
    remedy: str = ""
    tools: int = 0
    quarantined: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    """Tool -> why it is not offered."""
    transport: str = ""
    protocol_version: str = ""
    children: tuple[int, ...] = ()
    """Process ids."""
    reconnects: int = 0
    since: float = 0.0
    """In this state since this `anyio.current_time`."""
