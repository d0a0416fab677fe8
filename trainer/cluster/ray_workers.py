"""Rollout workers on a Ray cluster: where they connect, and an actor for each, which starts it again when it fails."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.workers.handshake import MIN_TOKEN_LENGTH, TOKEN_VARIABLE
from trainer.workers.line_channel import Address
from trainer.workers.placed_workers import PLACED_VARIABLE

WAIT_S = 1800
"""How long a worker waits for rank 0, which loads the model and waits for servers first."""
MAX_ACTORS = 5
"""How many actors one worker may have in one start of the ranks, if each is lost with its node."""


@dataclass(frozen=True)
class WorkerPlace:
    """Where the workers of one start of the ranks connect."""

    address: Address
    token: str

    @property
    def leader_variables(self) -> dict[str, str]:
        """Those of rank 0, which listens there."""
        return {PLACED_VARIABLE: str(self.address), **self.variables}

    @property
    def variables(self) -> dict[str, str]:
        """Those of each worker. The token is in no command line, which every user of a node can read."""
        return {TOKEN_VARIABLE: self.token}

    def arguments(self, name: str) -> tuple[str, ...]:
        """Those of the command of a worker."""
        return ("--connect", str(self.address), "--name", name, "--wait", str(WAIT_S))


def choose_worker_place(host: str, port: int, variables: Mapping[str, str] = os.environ) -> WorkerPlace:
    """A place on rank 0's node, with the user's token if there is one, since other workers may have it."""
    given = variables.get(TOKEN_VARIABLE, "")
    return WorkerPlace(Address(host, port), given if len(given) >= MIN_TOKEN_LENGTH else secrets.token_urlsafe(24))


@dataclass
class RayWorker:
    """One worker: how to make its actor, and what that one runs."""

    name: str
    make_actor: Callable[[], Any]
    arguments: tuple[Any, ...]
    """Of `NodeProcess.keep_running`."""
    actor: Any = None
    actors_left: int = MAX_ACTORS

    def start(self) -> Any:
        """Starts it in a new actor; the result is there once it has ended for good."""
        self.actors_left -= 1
        self.actor = self.make_actor()
        return self.actor.keep_running.remote(*self.arguments)


def replace_lost_worker(ray: Any, end: Any, workers: dict[Any, RayWorker], log: Callable[[str], None]) -> None:
    """Starts a worker whose actor was lost in another one. One that failed too often stays away: the others play."""
    worker = workers.pop(end)
    try:
        code = ray.get(end)
    except ray.exceptions.RayError:
        log(f"the actor of the rollout worker {worker.name} was lost; {worker.actors_left} more may be made")
        if worker.actors_left:
            workers[worker.start()] = worker
    else:
        ray.kill(worker.actor)  # The next start of the ranks needs its place.
        if code:
            log(f"the rollout worker {worker.name} failed too often (code {code}): see {worker.arguments[-2]}")
