"""A scheduler stands between the turns of every rollout: one object for all, as it is in ms-swift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.errors import ConfigError
from trainer.steps import Opening, Step, Turn
from trainer.swift.gym import multi_turns
from trainer.swift.plugins import made, ran, registered
from trainer.swift.scheduler import RolloutScheduler
from trainer.swift.trajectory import Engine, Trajectory


class Scheduled:
    """Begun for each rollout; the scheduler's verbs are asked there."""

    def __init__(self, scheduler: RolloutScheduler) -> None:
        self.scheduler = scheduler
        if scheduler.__dict__.get("infer_engine") is None:
            scheduler.infer_engine = Engine()

    def begin(self, opening: Opening) -> Trajectory:
        return Trajectory(self.scheduler, opening)

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("a scheduler is begun for each rollout")


def scheduled(found: Any, field: str = "stepper", **given: Any) -> Scheduled:
    """Of a class, or of an object of one."""
    scheduler = made(found, field, infer_engine=Engine(), **given)
    if not isinstance(scheduler, RolloutScheduler):
        problem = f"{found!r:.80} is no scheduler"
        raise ConfigError(problem, field=field, remedy="derive it from MultiTurnScheduler")
    return Scheduled(scheduler)


def named(name: str, plugins: str | Sequence[str] = (), **given: Any) -> Any:
    """What plug-in files register under a name in `multi_turns`."""
    files = ran(plugins, "stepper_args.plugins")
    found = registered(multi_turns, name, files, "stepper_args.name", "scheduler")
    return scheduled(found, "stepper_args.name", **given)
