"""Builds the optimizers (AdamW, or Muon for matrices), and computes the learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, pi

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.policy.settings import UpdateSettings

NamedParameters = Iterable[tuple[str, Tensor]]


def build_optimizers(parameters: NamedParameters, settings: UpdateSettings) -> list[torch.optim.Optimizer]:
    """Builds the optimizers for the parameters that require a gradient."""
    trained = [(name, value) for name, value in parameters if value.requires_grad]
    matrices = [value for name, value in trained if settings.optimizer == "muon" and is_muon_matrix(name, value)]
    matrix_ids = {id(value) for value in matrices}
    others = [value for _, value in trained if id(value) not in matrix_ids]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=settings.rates.muon, weight_decay=settings.weight_decay, momentum=0.95)
        )
    if others:
        optimizers.append(
            torch.optim.AdamW(others, lr=settings.rates.adamw, betas=settings.betas, weight_decay=settings.weight_decay)
        )
    return optimizers


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scales the gradients down to a norm of at most `limit`; returns the norm over all ranks before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    whole: Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return whole


def fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Gives weights that took no part in a step, such as those of a vision encoder without images, a gradient of 0.

    Optimizers skip weights without one. Ranks always have one, since another rank may have had images.
    """
    for group in optimizer.param_groups:
        for value in group["params"]:
            if value.grad is None:
                value.grad = torch.zeros_like(value)


def is_muon_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon applies: to matrices, except embeddings and the head, which are lookup tables."""
    return value.ndim == 2 and "embed" not in name and "lm_head" not in name


def learning_rate_factor(step: int, settings: UpdateSettings) -> float:
    """The learning rate at a step, as a share of the full rate: warm-up, then decay to the floor."""
    warmup = settings.warmup or 0
    if step < warmup:
        return (step + 1) / warmup
    if settings.steps is None:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    if settings.fall == "cosine":
        progress = (1.0 - cos(pi * progress)) / 2
    return 1.0 - (1.0 - settings.floor) * progress
