"""Rollout workers that this process does not start itself: their token, and those that the launcher places.

A launcher such as Ray's names the address for its workers in this process's environment, and the token beside it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gateway.errors import ConfigError
from mtrl_plugins.workers.handshake import MIN_TOKEN_LENGTH, TOKEN_VARIABLE
from mtrl_plugins.workers.line_channel import Address
from mtrl_plugins.workers.settings import WorkerSettings
from mtrl_plugins.workers.worker_link import UP, WorkerLink

PLACED_VARIABLE = "MTRL_PLACED_WORKERS"
"""`HOST:PORT` for `rollout.workers` workers, if the launcher starts them."""


@dataclass
class PlacedWorkers:
    """The workers of a run that its launcher starts."""

    address: Address
    count: int
    links: dict[str, WorkerLink] = field(default_factory=dict)
    """The latest connection of each."""
    restarts: int = 0
    """How often one connected again."""
    failed: WorkerLink | None = None
    """One that cannot play, as it said itself; one that was killed starts again."""

    @property
    def alive(self) -> int:
        """Those that play."""
        return sum(link.state == UP for link in self.links.values())

    def add(self, link: WorkerLink) -> None:
        """Counts a worker that has connected."""
        self.restarts += link.name in self.links
        self.links[link.name] = link

    def remove(self, link: WorkerLink) -> None:
        """Notes that a worker has ended."""
        if link.problem and not link.has_ended_itself:
            self.failed = link


def find_placed_workers(settings: WorkerSettings) -> PlacedWorkers | None:
    """The workers that the launcher starts; None if this process starts them."""
    text = os.environ.get(PLACED_VARIABLE)
    if text is None or not settings.workers:
        return None
    try:
        return PlacedWorkers(Address.parse(text), settings.workers)
    except ValueError as error:
        raise ConfigError(str(error), field=PLACED_VARIABLE, remedy="remove it from the environment") from None


def read_worker_token(settings: WorkerSettings) -> str:
    """The token for workers of other machines. Raises ConfigError if it is needed and missing, or short."""
    placed = find_placed_workers(settings)
    if settings.listen is None and placed is None:
        return ""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < MIN_TOKEN_LENGTH:
        problem = f"needs a token of at least {MIN_TOKEN_LENGTH} characters in {TOKEN_VARIABLE}"
        remedy = f"export {TOKEN_VARIABLE}=$(openssl rand -hex 24) here and where the workers start"
        raise ConfigError(problem, field=PLACED_VARIABLE if placed else "rollout.listen", remedy=remedy)
    return token
