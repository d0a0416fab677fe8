"""The same learning, written as three loops over lists: slow, plain, and what the tensors are held against."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

from trainer.learn.batch import Batch, Row, pack

Lists = list[list[float]]


@dataclass
class Slow:
    """A batch as lists of lists, with the new and the reference policy's logprobs."""

    rows: list[Row]
    new: Lists
    old: Lists
    ref: Lists = field(default_factory=list)

    def batch(self) -> Batch:
        packed = pack(self.rows)
        return replace(
            packed,
            weights_T=packed.weights_T.double(),
            advantages_T=torch.tensor([a for row in self.rows for a in row.advantages], dtype=torch.float64),
            engine_T=torch.tensor([e for row in self.rows for e in row.engine], dtype=torch.float64),
            old_T=flat(self.old),
            ref_T=flat(self.ref),
        )

    def logprobs(self) -> Tensor:
        return flat(self.new).requires_grad_()


def flat(lists: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for one in lists for value in one], dtype=torch.float64)


def make(seed: int, sequences: int = 4, apart: float = 0.3) -> Slow:
    """Random rollouts of prompts, turns and tool answers; the policies are about `apart` from each other."""
    random = Random(seed)
    rows, new, old, ref = [], [], [], []
    for number in range(sequences):
        mask = [False] * random.randint(1, 3)
        for _ in range(random.randint(1, 3)):
            mask += [True] * random.randint(1, 4) + [False] * random.randint(0, 2)
        engine = [-random.random() * 3 if written else 0.0 for written in mask]
        weights = [random.choice([0.0, 0.5, 1.0, 1.0]) * written for written in mask]
        weights[mask.index(True)] = 1.0
        advantages = [random.gauss(0, 1) * written for written in mask]
        ids = [random.randrange(9) for _ in mask]
        rows.append(Row(f"t{number}/0", ids, mask, engine, advantages, weights, number // 2))
        old.append([value + random.gauss(0, apart) for value in engine])
        new.append([value + random.gauss(0, apart) for value in old[-1]])
        ref.append([value + random.gauss(0, apart) for value in engine])
    return Slow(rows, new, old, ref)


def trained(row: Row) -> list[int]:
    return [token for token, weight in enumerate(row.weights) if weight > 0]


def aggregate(losses: Lists, rows: list[Row], kind: str, length: int) -> float:
    """By the definition: a sum over rollouts, over tokens."""
    top = below = 0.0
    for row, values in zip(rows, losses, strict=True):
        weighted = weight = 0.0
        for token in trained(row):
            weighted += row.weights[token] * values[token]
            weight += row.weights[token]
        top += weighted / weight if kind == "sequence" else weighted
        below += {"token": weight, "sequence": 1.0, "constant": float(length)}[kind]
    return top / below


def bounds(name: str, slow: Slow, low: float, high: float) -> Iterator[tuple[int, int, float, float]]:
    """Of each token that is trained: its row, its place, its ratio, and that ratio within its bounds."""
    for place, (row, new, old) in enumerate(zip(slow.rows, slow.new, slow.old, strict=True)):
        tokens = trained(row)
        mean = sum(new[token] - old[token] for token in tokens) / len(tokens)
        for token in tokens:
            ratio = math.exp(mean if name == "gspo" else new[token] - old[token])
            yield place, token, ratio, min(max(ratio, 1 - low), 1 + high)


def objective(name: str, slow: Slow, low: float, high: float) -> Lists:
    """Of each token, what the papers' formulas say."""
    losses = [[0.0] * len(row.ids) for row in slow.rows]
    for place, token, ratio, bound in bounds(name, slow, low, high):
        advantage = slow.rows[place].advantages[token]
        if name == "rloo":
            losses[place][token] = -ratio * advantage
        elif name == "cispo":
            losses[place][token] = -bound * advantage * slow.new[place][token]
        else:
            losses[place][token] = -min(ratio * advantage, bound * advantage)
    return losses


def pull(name: str, slow: Slow, low: float, high: float) -> Lists:
    """The derivative of each token's loss by that token's logprob, as the papers have it."""
    pulls = [[0.0] * len(row.ids) for row in slow.rows]
    for place, token, ratio, bound in bounds(name, slow, low, high):
        advantage = slow.rows[place].advantages[token]
        if name == "cispo":
            pulls[place][token] = -bound * advantage
        elif name == "rloo" or ratio * advantage <= bound * advantage:
            pulls[place][token] = -ratio * advantage
    return pulls
