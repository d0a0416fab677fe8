"""The demos by name: their task generators, model builders and warm-start recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from gateway.plugins import load_name
from mtrl_plugins.demo.plugin import PLUGIN
from mtrl_plugins.demo.problem import Problem, Split
from mtrl_plugins.demo.settings import DemoSettings
from mtrl_plugins.demo.warm_start import Progress, Recipe, WarmStartSetup
from trainer.rollout.task import Task

if TYPE_CHECKING:
    from trainer.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class DemoTasks(Sequence[Task]):
    """Tasks that are generated when they are read, the same for the same seed, in turn of each kind."""

    demo: Demo
    seed: int
    size: int
    split: Split = "train"
    kinds: tuple[str, ...] = ()
    """By default all kinds of the demo."""

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        numbers = range(self.size)[index]
        return self._draw(numbers) if isinstance(numbers, int) else [self._draw(number) for number in numbers]

    def _draw(self, number: int) -> Task:
        kinds = self.kinds or self.demo.kinds
        return self.demo.draw_problem(self.seed, number, kinds[number % len(kinds)], self.split).task


TASKS = 4096
"""Training tasks that are drawn from a demo, whose supply is unlimited."""
HELD_OUT_SEED = 10**6
"""The seed of a demo's evaluation tasks, whatever the run's seed."""


@dataclass(frozen=True)
class Demo:
    """A generator of tasks, and how to build a model for them."""

    kinds: tuple[str, ...]
    """The kinds of tasks that are drawn by default."""
    draw_problem: Callable[[int | str, int, str, Split], Problem]
    """Generates a problem from a seed, a number, a kind and a split; deterministic."""
    recipes: Mapping[str, Recipe]
    """Warm starts by name, as in the setting `warm`."""
    build_model: Callable[[Path, int], Path]
    """Writes a model with random weights, from a seed, into a folder."""
    build_warm_start: Callable[[Path], WarmStartSetup]
    """Sets up the warm start of the model in a folder."""
    tools: Path | None = None
    """The tools that its tasks need, for runs that name none."""

    def make_tasks(self, settings: TrainSettings, *, held_out: bool) -> Sequence[Task]:
        """The tasks, for training or for evaluation."""
        kinds = DemoSettings.read(settings).kinds
        if held_out:
            return DemoTasks(self, HELD_OUT_SEED, settings.evaluation.final_rows, "held_out", kinds)
        return DemoTasks(self, settings.seed, TASKS, "train", kinds)

    def prepare_model(self, settings: TrainSettings, report: Progress) -> Path:
        """The folder of the model, which is built if it does not exist yet."""
        from mtrl_plugins.demo.model_cache import find_or_build_model

        recipe = self.recipes[DemoSettings.read(settings).warm]
        return find_or_build_model(replace(recipe, seed=settings.seed), report=report)


def load_demo(name: str) -> Demo:
    """Imports a demo's module, which is slow."""
    demo: Demo = load_name(PLUGIN.examples[name])
    return demo
