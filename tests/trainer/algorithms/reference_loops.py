"""Reference implementations of the algorithms as loops over lists, which the tensor code is compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

from trainer.algorithms.loss import StepTotals
from trainer.algorithms.packing import Batch, BatchRow, pack

FloatLists = list[list[float]]


@dataclass
class ListBatch:
    """A batch as lists of lists, with the logprobs of the new, the old and the reference policy."""

    rows: list[BatchRow]
    new: FloatLists
    old: FloatLists
    ref: FloatLists = field(default_factory=list)

    def batch(self) -> Batch:
        packed = pack(self.rows)
        return replace(
            packed,
            weights_T=packed.weights_T.double(),
            advantages_T=torch.tensor([a for row in self.rows for a in row.advantages], dtype=torch.float64),
            engine_logprobs_T=torch.tensor([e for row in self.rows for e in row.engine_logprobs], dtype=torch.float64),
            old_logprobs_T=to_tensor(self.old),
            ref_logprobs_T=to_tensor(self.ref),
        )

    def logprobs(self) -> Tensor:
        return to_tensor(self.new).requires_grad_()


def step_totals(*batches: Batch) -> StepTotals:
    """The totals of batches whose sequences are rollouts of one ledger each."""
    rollouts = sum(int((batch.sum_by_sequence(batch.weights_T) > 0).sum()) for batch in batches)
    return StepTotals(sum(float(batch.weights_T.double().sum()) for batch in batches), rollouts)


def to_tensor(lists: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=torch.float64)


def make_batch(seed: int, sequences: int = 4, spread: float = 0.3) -> ListBatch:
    """Random rollouts of prompts, turns and tool results. Logprobs of the policies differ by about `spread`."""
    random = Random(seed)
    rows, new, old, ref = [], [], [], []
    for index in range(sequences):
        mask = [False] * random.randint(1, 3)
        for _ in range(random.randint(1, 3)):
            mask += [True] * random.randint(1, 4) + [False] * random.randint(0, 2)
        engine = [-random.random() * 3 if written else 0.0 for written in mask]
        weights = [random.choice([0.0, 0.5, 1.0, 1.0]) * written for written in mask]
        weights[mask.index(True)] = 1.0
        advantages = [random.gauss(0, 1) * written for written in mask]
        ids = [random.randrange(9) for _ in mask]
        rows.append(BatchRow(f"t{index}/0", ids, mask, engine, advantages, weights, index // 2))
        old.append([value + random.gauss(0, spread) for value in engine])
        new.append([value + random.gauss(0, spread) for value in old[-1]])
        ref.append([value + random.gauss(0, spread) for value in engine])
    return ListBatch(rows, new, old, ref)


def trained_tokens(row: BatchRow) -> list[int]:
    return [token for token, weight in enumerate(row.weights) if weight > 0]


def aggregate_losses(losses: FloatLists, rows: list[BatchRow], kind: str, length: int) -> float:
    """Aggregates losses by definition: a sum over rollouts and tokens."""
    numerator = denominator = 0.0
    for row, values in zip(rows, losses, strict=True):
        weighted = weight = 0.0
        for token in trained_tokens(row):
            weighted += row.weights[token] * values[token]
            weight += row.weights[token]
        numerator += weighted / weight if kind == "sequence" else weighted
        denominator += {"token": weight, "sequence": 1.0, "constant": float(length)}[kind]
    return numerator / denominator


def clipped_ratios(name: str, batch: ListBatch, low: float, high: float) -> Iterator[tuple[int, int, float, float]]:
    """Yields each trained token's row, position, ratio, and clipped ratio."""
    for row_index, (row, new, old) in enumerate(zip(batch.rows, batch.new, batch.old, strict=True)):
        tokens = trained_tokens(row)
        mean = sum(new[token] - old[token] for token in tokens) / len(tokens)
        for token in tokens:
            ratio = math.exp(mean if name == "gspo" else new[token] - old[token])
            yield row_index, token, ratio, min(max(ratio, 1 - low), 1 + high)


def token_losses(name: str, batch: ListBatch, low: float, high: float) -> FloatLists:
    """Each token's loss, by the papers' formulas."""
    losses = [[0.0] * len(row.ids) for row in batch.rows]
    for row_index, token, ratio, bound in clipped_ratios(name, batch, low, high):
        advantage = batch.rows[row_index].advantages[token]
        if name == "sft":
            losses[row_index][token] = -advantage * batch.new[row_index][token]
        elif name == "rloo":
            losses[row_index][token] = -ratio * advantage
        elif name == "cispo":
            losses[row_index][token] = -bound * advantage * batch.new[row_index][token]
        else:
            losses[row_index][token] = -min(ratio * advantage, bound * advantage)
    return losses


def loss_derivative(name: str, batch: ListBatch, low: float, high: float) -> FloatLists:
    """The derivative of each token's loss with respect to its logprob, by the papers' formulas."""
    derivatives = [[0.0] * len(row.ids) for row in batch.rows]
    for row_index, token, ratio, bound in clipped_ratios(name, batch, low, high):
        advantage = batch.rows[row_index].advantages[token]
        if name == "sft":
            derivatives[row_index][token] = -advantage
        elif name == "cispo":
            derivatives[row_index][token] = -bound * advantage
        elif name == "rloo" or ratio * advantage <= bound * advantage:
            derivatives[row_index][token] = -ratio * advantage
    return derivatives
