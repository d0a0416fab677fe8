"""FLOPs of an update, and the peak of known GPUs.

The tokens that siblings share are computed once, and logits only for tokens that are trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.algorithms.packing import BatchRow
from trainer.policy.microbatch import split_micro_batches
from trainer.policy.policy import Policy
from trainer.policy.prefix_forest import build_forest

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Per second in bfloat16, without sparsity."""
FLOPS_PER_WEIGHT = 6
"""For each token: two in the forward pass, four in the backward pass."""


def count_computed(rows: Sequence[BatchRow], max_tokens: int, share_prefixes: bool) -> tuple[int, int]:
    """Tokens that pass through the layers, and tokens with logits, in micro-batches of up to `max_tokens`.

    Without shared prefixes both are all tokens.
    """
    if not share_prefixes:
        return (everything := sum(len(row.ids) for row in rows), everything)
    layer_tokens = logit_tokens = 0
    for part in split_micro_batches([row.ids for row in rows], [row.group for row in rows], max_tokens):
        node_T, nodes = _forest_nodes(rows[part])
        trained_T = torch.tensor([weight > 0 for row in rows[part] for weight in row.weights])
        layer_tokens += nodes
        logit_tokens += len(node_T[trained_T.nonzero()[:, 0] - 1].unique())
    return layer_tokens, logit_tokens


def _forest_nodes(rows: Sequence[BatchRow]) -> tuple[Tensor, int]:
    ids_T = torch.tensor([token for row in rows for token in row.ids])
    sequence_T = torch.tensor([index for index, row in enumerate(rows) for _ in row.ids])
    forest = build_forest(ids_T, sequence_T)
    return forest.node_T, len(forest.ids_U)


def update_flops(policy: Policy, layer_tokens: int, logit_tokens: int) -> float:
    """FLOPs of an update, without attention's own and without recomputation."""
    model = policy.model
    input_embedding = model.get_input_embeddings().weight.numel()  # looked up, not multiplied
    layers = sum(weight.numel() for weight in model.base_model.parameters()) - input_embedding
    output_embedding = model.get_output_embeddings().weight.numel()
    return float(FLOPS_PER_WEIGHT * (layers * layer_tokens + output_embedding * logit_tokens))


def peak_flops() -> float | None:
    """The GPU's peak per second; None without a GPU, and for unknown ones."""
    if not torch.cuda.is_available():
        return None
    return next((peak for name, peak in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
