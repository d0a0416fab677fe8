"""The demos by name: their task generators, model builders and warm-start recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import overload

from trainer.demo.problem import Problem, Split
from trainer.demo.warm_start import Recipe, WarmStartSetup
from trainer.rollout.task import Task


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


DEMO_MODULES: Mapping[str, str] = {
    "demo": "trainer.demo.facts.facts_demo",
    "sight": "trainer.demo.sight.sight_demo",
    "shelves": "trainer.demo.shelves.shelves_demo",
}
"""The names for `model` and `data`, and the modules with their DEMO."""


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


def load_demo(name: str) -> Demo:
    """Imports a demo's module, which is slow."""
    demo: Demo = import_module(DEMO_MODULES[name]).DEMO
    return demo
