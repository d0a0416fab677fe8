"""Rollout workers on a Ray cluster: an actor for each, which starts it again when it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_ACTORS = 5
"""How many actors one worker may have in one start of the ranks, if each is lost with its node."""


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
