"""The stepper that runs ms-swift's multi-turn schedulers; one scheduler object serves all rollouts, as in ms-swift."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.errors import ConfigError
from mtrl_plugins.swift.gym import multi_turns
from mtrl_plugins.swift.multi_turn_scheduler import MultiTurnScheduler, RolloutScheduler
from mtrl_plugins.swift.plugin_files import find_registered, instantiate, load_plugin_files
from mtrl_plugins.swift.trajectory import Engine, Trajectory
from trainer.rollout.steppers import RolloutStart, Step, Turn


class SchedulerStepper:
    """A stepper that begins a `Trajectory` for each rollout, which calls the scheduler."""

    def __init__(self, scheduler: RolloutScheduler) -> None:
        self.scheduler = scheduler
        if scheduler.__dict__.get("infer_engine") is None:
            scheduler.infer_engine = Engine()

    def begin(self, opening: RolloutStart) -> Trajectory:
        return Trajectory(self.scheduler, opening)

    def check_finished(self, turn: Turn) -> bool:
        return False

    def step(self, turn: Turn) -> Step:
        raise NotImplementedError("call `begin` for each rollout")


def make_swift_stepper(plugin: Any, options: Mapping[str, Any]) -> SchedulerStepper | None:
    """The stepper for a scheduler's class or object; None for anything else."""
    if isinstance(plugin, RolloutScheduler) or (isinstance(plugin, type) and issubclass(plugin, RolloutScheduler)):
        return wrap_scheduler(plugin, **options)
    is_plain = not isinstance(plugin, type) and not options and takes_requests(plugin)
    return wrap_plain_scheduler(plugin) if is_plain else None


def wrap_scheduler(plugin: Any, field: str = "stepper", **options: Any) -> SchedulerStepper:
    """The stepper for a scheduler class or object."""
    scheduler = instantiate(plugin, field, infer_engine=Engine(), **options)
    if not isinstance(scheduler, RolloutScheduler):
        if takes_requests(scheduler):
            return wrap_plain_scheduler(scheduler, field)
        problem = f"{plugin!r:.80} is not a scheduler"
        raise ConfigError(problem, field=field, remedy="derive it from MultiTurnScheduler")
    return SchedulerStepper(scheduler)


class _PlainScheduler(MultiTurnScheduler):
    """A scheduler that has `step` and perhaps `check_finished`, but is not derived from our base class."""

    def __init__(self, plugin: Any, infer_engine: Any) -> None:
        super().__init__(infer_engine, getattr(plugin, "max_turns", None))
        self.step = plugin.step  # type: ignore[method-assign]
        if hasattr(plugin, "check_finished"):
            self.check_finished = plugin.check_finished  # type: ignore[method-assign]


def takes_requests(plugin: Any) -> bool:
    """Whether the plug-in's `step` has a scheduler's parameters: the request, the result and the turn's number."""
    try:
        inspect.signature(plugin.step).bind(None, None, 1)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def wrap_plain_scheduler(plugin: Any, field: str = "stepper") -> SchedulerStepper:
    """The stepper for a scheduler on a base class of its own, as in ms-swift's documentation."""
    if hasattr(plugin, "check_finished"):
        try:
            inspect.signature(plugin.check_finished).bind(None, None, 1)
        except TypeError as error:
            code = inspect.unwrap(plugin.check_finished).__code__
            remedy = "define check_finished(self, infer_request, result, current_turn), like `step`"
            raise ConfigError(
                f"{type(plugin).__name__}.check_finished {error}",
                file=f"{code.co_filename}:{code.co_firstlineno}",
                field=field,
                remedy=remedy,
            ) from error
    return SchedulerStepper(_PlainScheduler(plugin, Engine()))


def named(name: str, plugins: str | Sequence[str] = (), **options: Any) -> Any:
    """The stepper for a scheduler that a plug-in file registers in `multi_turns`."""
    files = load_plugin_files(plugins, "stepper_args.plugins")
    plugin = find_registered(multi_turns, name, files, "stepper_args.name", "scheduler")
    return wrap_scheduler(plugin, "stepper_args.name", **options)
