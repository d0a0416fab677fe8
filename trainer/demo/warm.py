"""A warm start: first the skill, then a habit that hides it, since only what is sometimes done can be rewarded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from trainer.demo.demonstrate import Writer
from trainer.demo.facts.task import KINDS
from trainer.demo.problem import Problem
from trainer.ledger import Ledger

Told = Callable[[int, int, float], None]
INNER = {"layers", "blocks"}
"""What holds the layers of a model that reads, and of its eyes."""
LESSONS = (*KINDS, "sum")
"""Sums come twice: they are learned last, because their numbers are copied out of the question and not of an answer."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a demo's model comes to its skill and its habit."""

    clean: int = 1000
    """Steps on perfect demonstrations."""
    habit: int = 150
    """Steps on demonstrations that mostly guess."""
    right: float = 0.25
    """How likely a call is made in the habit's demonstrations, rather than its answer guessed."""
    kinds: tuple[str, ...] = LESSONS
    """Shown one after the other."""
    batch: int = 16
    muon: float = 0.02
    adam: float = 3e-3
    rise: int = 15
    level: float = 0.6
    """The learning rate falls from this share of the clean steps on."""
    relearn: float = 1e-3
    """The rate at which the habit is learned."""
    demo: str = "demo"
    """Whose tasks and model."""
    seed: int = 0


PLAIN = Recipe(clean=300, habit=0, kinds=("fact", "sum", "hop"))
"""No habit, and never more than two lookups; it stops while other ways than those shown are still tried at times."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Ledgers side by side, padded on the right, which a causal model does not see."""

    ids: Tensor
    mask: Tensor
    """True where the policy wrote the id."""

    @classmethod
    def of(cls, ledgers: Sequence[Ledger]) -> Rows:
        ids = [torch.tensor(ledger.ids) for ledger in ledgers]
        mask = [torch.tensor(ledger.mask) for ledger in ledgers]
        return cls(*(torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (ids, mask)))


@dataclass(frozen=True)
class School:
    """What is shown, and what is made of it."""

    writer: Writer
    problems: Callable[[str, tuple[str, ...]], Iterator[Problem]]
    """Without end, of a seed and the kinds."""
    loss: Callable[[PreTrainedModel, Sequence[Ledger]], Tensor]


@dataclass(frozen=True, slots=True)
class _Lessons:
    """A part of the recipe. It draws and steps by itself, so that the parts may also be learned one at a time."""

    name: str
    steps: int
    right: float
    optimizers: Sequence[Optimizer]
    rate: Callable[[int], float]

    def demonstrations(self, school: School, recipe: Recipe) -> Iterator[list[Ledger]]:
        draw = Random(f"{self.name}/{recipe.seed}")  # noqa: S311 - no secret
        drawn = school.problems(f"{self.name}/{recipe.seed}", recipe.kinds)
        for _ in range(self.steps):
            yield [school.writer.demonstration(next(drawn), draw, self.right) for _ in range(recipe.batch)]


def warm(model: PreTrainedModel, school: School, recipe: Recipe, told: Told = lambda *_: None) -> None:
    """Trains the model in place; `told` hears of each step: which, of how many, and its loss."""
    model.train()
    done, of = 0, recipe.clean + recipe.habit
    for lessons in filter(lambda one: one.steps, (_skill(model, recipe), _habit(model, recipe))):
        schedules = [LambdaLR(one, lessons.rate) for one in lessons.optimizers]
        for ledgers in lessons.demonstrations(school, recipe):
            loss = school.loss(model, ledgers)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(lessons.optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            done += 1
            told(done, of, loss.item())
    model.train(False)


def _skill(model: PreTrainedModel, recipe: Recipe) -> _Lessons:
    """Muon for the matrices within the layers, AdamW for all else."""
    inner = {name for name, weight in model.named_parameters() if weight.ndim == 2 and INNER & {*name.split(".")}}
    matrices = [weight for name, weight in model.named_parameters() if name in inner]
    others = [weight for name, weight in model.named_parameters() if name not in inner]
    muon = torch.optim.Muon(matrices, lr=recipe.muon, momentum=0.95, weight_decay=0.0)

    def rate(step: int) -> float:
        fall = (recipe.clean - step) / (recipe.clean * (1 - recipe.level))
        return min(1.0, (step + 1) / recipe.rise, fall)

    return _Lessons("skill", recipe.clean, 1.0, (muon, _adam(others, recipe.adam)), rate)


def _habit(model: PreTrainedModel, recipe: Recipe) -> _Lessons:
    """AdamW alone, with steps as large as those of the job that is to undo it."""
    adam = _adam(model.parameters(), recipe.relearn)
    return _Lessons("habit", recipe.habit, recipe.right, (adam,), lambda step: 1 - step / recipe.habit)


def _adam(weights: Iterable[Parameter], rate: float) -> Optimizer:
    return torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)


def of_text(model: PreTrainedModel, ledgers: Sequence[Ledger]) -> Tensor:
    """The mean over the tokens that the policy wrote, and no others."""
    rows = Rows.of(ledgers)
    logits = model(input_ids=rows.ids).logits[:, :-1][rows.mask[:, 1:]]
    return cross_entropy(logits, rows.ids[:, 1:][rows.mask[:, 1:]])
