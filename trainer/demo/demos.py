"""A demo is a kind of tasks that are made up on the spot, and a tiny model that is made for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from trainer.demo.problem import Problem, Split
from trainer.demo.warm import Recipe, School

NAMES: Mapping[str, str] = {"demo": "trainer.demo.facts.demo", "sight": "trainer.demo.sight.demo"}
"""As `model` and `data` may name them, and the module whose DEMO each is."""


@dataclass(frozen=True)
class Demo:
    kinds: tuple[str, ...]
    """Those that are drawn where none are named."""
    problem: Callable[[int | str, int, str, Split], Problem]
    """Of a seed, a place, a kind; the same for the same ones."""
    recipes: Mapping[str, Recipe]
    """As `warm` names them."""
    build: Callable[[Path, int], Path]
    """A model's folder as `save_pretrained` writes it, its weights random, of a seed."""
    school: Callable[[Path], School]
    """For the model in a folder."""


def demo(name: str) -> Demo:
    found: Demo = import_module(NAMES[name]).DEMO
    return found
