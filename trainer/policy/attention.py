"""Attention over a forest: each block of nodes by itself, so that nothing sees a row which is not its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from trainer.policy.forest import Blocks, Forest

NAME = "forest"


def register() -> None:
    """Makes it known to transformers by name, which is the only way to a model's own layers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def attend(
    _: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **given: Any
) -> tuple[Tensor, None]:
    """In and out as transformers has it: one row, whose tokens are the forest's nodes."""
    forest: Forest = given["forest"]
    nodes = [one[0].transpose(0, 1).flatten(1) for one in (query, key, value)]
    sizes = [one.shape[1] for one in (query, key, value)]
    done = []
    for blocks in forest.blocks:
        near = (_laid(one_UX, blocks, heads) for one_UX, heads in zip(nodes, sizes, strict=True))
        seen = _seen(blocks, given.get("sliding_window"))
        how: dict[str, Any] = {"attn_mask": seen, "is_causal": seen is None, "enable_gqa": sizes[0] != sizes[1]}
        result = scaled_dot_product_attention(*near, scale=given.get("scaling"), **how)  # type: ignore[misc, arg-type]
        done.append(result.transpose(1, 2).flatten(0, 1).flatten(1))
    result_UX = embedding(forest.back_U, done[0] if len(done) == 1 else torch.cat(done))
    return result_UX.view(1, len(forest.back_U), sizes[0], -1), None


def _laid(nodes_UX: Tensor, blocks: Blocks, heads: int) -> Tensor:
    """Axes: block, head, place, size. Taken as from a table, whose gradient is many times quicker than an index's."""
    laid_BMX = embedding(blocks.at_BM, nodes_UX)
    return laid_BMX.view(*blocks.at_BM.shape, heads, -1).transpose(1, 2)


def _seen(blocks: Blocks, window: int | None) -> Tensor | None:
    """Axes: block, head, place, place. A window counts places of the row, which ancestors are in order."""
    seen_BMM, size = blocks.seen_BMM, blocks.at_BM.shape[1]
    if window is None or size <= window:
        return None if seen_BMM is None else seen_BMM[:, None]
    if seen_BMM is None:
        before_MM = torch.ones(size, size, dtype=torch.bool, device=blocks.at_BM.device).tril()
        return before_MM.triu(1 - window)
    depth_BM = seen_BMM.sum(-1)
    near_BMM = depth_BM[:, :, None] - depth_BM[:, None, :] < window
    return (seen_BMM & near_BMM)[:, None]


def _no_mask(*_: Any, **__: Any) -> None:
    """Blocks say who sees whom."""
