"""The demo for a model that sees: the colour of a room that only pictures show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from trainer.demo.demonstrate import Writer
from trainer.demo.demos import Demo
from trainer.demo.problem import Problem
from trainer.demo.sight.model import build
from trainer.demo.sight.task import KIND, TOOLS, problem
from trainer.demo.warm import Recipe, School
from trainer.learn.batch import Row, pack
from trainer.ledger import Ledger
from trainer.policy.reader import Reader
from trainer.template import Template

CHUNK = 4096
"""Places whose logits are at hand at a time: all of a batch."""
HABIT = Recipe(demo="sight", clean=400, habit=80, kinds=(KIND,))


def school(folder: Path) -> School:
    """All that learns by pictures reads as the trainer does."""
    template = Template.load(folder)
    readers: dict[PreTrainedModel, Reader] = {}

    def loss(model: PreTrainedModel, ledgers: Sequence[Ledger]) -> Tensor:
        if model not in readers:  # Making one tries how the model is read best.
            readers[model] = Reader(model, CHUNK, eyes=template.eyes)
        return of_ledgers(readers[model], ledgers)

    return School(Writer(template, TOOLS), _drawn, loss)


def of_ledgers(reader: Reader, ledgers: Sequence[Ledger]) -> Tensor:
    """The mean over the tokens that the policy wrote, and no others."""
    batch = pack([_row(ledger) for ledger in ledgers])
    read = reader.read(batch.ids_T, batch.sequence_T, batch.mask_T, images=batch.images)
    return -read.logprobs_T[batch.mask_T].mean()


def _row(ledger: Ledger) -> Row:
    wide = ledger.expanded
    nothing = (0.0,) * len(wide)
    return Row("", wide.ids, wide.mask, nothing, nothing, nothing, pictures=wide.places)


def _drawn(seed: str, kinds: tuple[str, ...]) -> Iterator[Problem]:
    return (problem(seed, place, kinds[place % len(kinds)]) for place in count())


DEMO = Demo((KIND,), problem, {"habit": HABIT}, build, school)
