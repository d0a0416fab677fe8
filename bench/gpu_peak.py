"""What an update asks of a device: of siblings, what they share is computed once, and logits only where they teach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.learn.batch import Row
from trainer.policy.cut import micro
from trainer.policy.forest import forest
from trainer.policy.policy import Policy

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Products and sums a second in bfloat16, without sparsity."""
OF_A_WEIGHT = 6
"""Products and sums for a token and a weight: two on the way there, four on the way back."""


def computed(rows: Sequence[Row], tokens: int, alone: bool) -> tuple[int, int]:
    """Tokens that go through the layers, and those of which there are logits: in passes of so many `tokens` each.

    `alone` is whether rows share nothing. Then all of a row has logits.
    """
    if alone:
        return (everything := sum(len(row.ids) for row in rows), everything)
    nodes = drawn = 0
    for part in micro([len(row.ids) for row in rows], tokens):
        at_T, nodes_here = _nodes(rows[part])
        taught_T = torch.tensor([weight > 0 for row in rows[part] for weight in row.weights])
        nodes, drawn = nodes + nodes_here, drawn + len(at_T[taught_T.nonzero()[:, 0] - 1].unique())
    return nodes, drawn


def _nodes(rows: Sequence[Row]) -> tuple[Tensor, int]:
    ids_T = torch.tensor([token for row in rows for token in row.ids])
    sequence_T = torch.tensor([place for place, row in enumerate(rows) for _ in row.ids])
    grown = forest(ids_T, sequence_T)
    return grown.at_T, len(grown.ids_U)


def operations(policy: Policy, nodes: int, drawn: int) -> float:
    """Products and sums of an update, attention's own and what is computed twice to save memory not counted."""
    model = policy.model
    looked_up = model.get_input_embeddings().weight.numel()  # and not multiplied
    layers = sum(weight.numel() for weight in model.base_model.parameters()) - looked_up
    return float(OF_A_WEIGHT * (layers * nodes + model.get_output_embeddings().weight.numel() * drawn))


def peak() -> float | None:
    """None without a GPU, and of one that is not known here."""
    if not torch.cuda.is_available():
        return None
    return next((peak for name, peak in PEAKS.items() if name in torch.cuda.get_device_name()), None)
