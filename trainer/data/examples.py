"""Models and tasks that have a name instead of a file, such as `demo`; plug-ins bring them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gateway.errors import ConfigError
from gateway.plugins import find_all, find_missing, load_name

if TYPE_CHECKING:
    from trainer.rollout.task import Task
    from trainer.train.settings import TrainSettings

WarmStartProgress = Callable[[int, int, float], None]
"""Called with the step, the number of steps, and the loss."""
CHECKED_TASKS = 20
"""Tasks of an example that are checked; all are alike."""


class Example(Protocol):
    """Generated tasks, and a model that is built for them."""

    tools: Path | None
    """The tools that its tasks need, for runs that name none."""

    def make_tasks(self, settings: TrainSettings, *, held_out: bool) -> Sequence[Task]:
        """Its tasks, for training or for evaluation."""
        ...

    def prepare_model(self, settings: TrainSettings, report: WarmStartProgress) -> Path:
        """The folder of its model, which is built if it does not exist yet."""
        ...


def example_names() -> frozenset[str]:
    """The names of all examples."""
    return frozenset(find_all(lambda plugin: plugin.examples))


def load_example(name: str) -> Example:
    """The example of a name, whose module is imported."""
    example: Example = load_name(find_all(lambda plugin: plugin.examples)[name])
    return example


def require_example(name: str, field: str) -> None:
    """Raises ConfigError if the name is that of an example whose plug-in is missing."""
    if name not in example_names() and (plugin := find_missing(name)) and not Path(name).exists():
        remedy = f"install it, or name a `{field}` of your own"
        raise ConfigError(f"{name!r} needs the plug-in {plugin!r}, which is not installed", field=field, remedy=remedy)
