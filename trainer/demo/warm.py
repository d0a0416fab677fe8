"""A warm start: first the skill, then a habit that hides it, since only what is sometimes done can be rewarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from trainer.demo.demonstrate import Writer
from trainer.demo.task import problems
from trainer.ledger import Ledger


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the demo's model comes to its skill and its habit."""

    clean: int = 500
    """Steps on perfect demonstrations."""
    habit: int = 100
    """Steps on demonstrations that mostly guess."""
    right: float = 0.25
    """How likely a call is made in the habit's demonstrations, rather than its answer guessed."""
    batch: int = 16
    muon: float = 0.02
    adam: float = 3e-3
    rise: int = 15
    level: float = 0.6
    """The learning rate falls from this share of the clean steps on."""
    relearn: float = 0.3
    """The habit is learned at this share of the rate, which falls from there."""
    seed: int = 0


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


def warm(
    model: PreTrainedModel, writer: Writer, recipe: Recipe, told: Callable[[int, float], None] = lambda *_: None
) -> None:
    """Trains the model in place; `told` hears each step's loss."""
    optimizers = _optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda at: _rate(at, recipe)) for one in optimizers]
    model.train()
    for step, ledgers in enumerate(_batches(writer, recipe)):
        rows = Rows.of(ledgers)
        loss = _loss(model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        told(step, loss.item())
    model.train(False)


def _batches(writer: Writer, recipe: Recipe) -> Iterator[list[Ledger]]:
    draw = Random(recipe.seed)  # noqa: S311 - no secret
    drawn = problems(recipe.seed)
    for step in range(recipe.clean + recipe.habit):
        right = 1.0 if step < recipe.clean else recipe.right
        yield [writer.demonstration(next(drawn), draw, right) for _ in range(recipe.batch)]


def _loss(model: PreTrainedModel, rows: Rows) -> Tensor:
    """The mean over the tokens that the policy wrote, and no others."""
    logits = model(input_ids=rows.ids).logits[:, :-1][rows.mask[:, 1:]]
    return cross_entropy(logits, rows.ids[:, 1:][rows.mask[:, 1:]])


def _optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices within the layers, AdamW for all else."""
    inner = {name for name, weight in model.named_parameters() if weight.ndim == 2 and "layers" in name}
    matrices = [weight for name, weight in model.named_parameters() if name in inner]
    others = [weight for name, weight in model.named_parameters() if name not in inner]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=recipe.adam, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(step: int, recipe: Recipe) -> float:
    if step >= recipe.clean:
        return recipe.relearn * (1 - (step - recipe.clean) / max(1, recipe.habit))
    fall = (recipe.clean - step) / (recipe.clean * (1 - recipe.level))
    return min(1.0, (step + 1) / recipe.rise, fall)
