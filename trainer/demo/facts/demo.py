"""The default demo: facts that only a tool can tell."""

from __future__ import annotations

from pathlib import Path

from trainer.demo.demonstrate import Writer
from trainer.demo.demos import Demo
from trainer.demo.facts.model import build
from trainer.demo.facts.task import KINDS, TOOLS, problem, problems
from trainer.demo.warm import PLAIN, Recipe, School, of_text
from trainer.template import Template


def school(folder: Path) -> School:
    writer = Writer(Template.load(folder), TOOLS)
    return School(writer, lambda seed, kinds: problems(seed, kinds=kinds), of_text)


DEMO = Demo(tuple(KINDS), problem, {"habit": Recipe(), "plain": PLAIN}, build, school)
