"""Builds the optimizers (AdamW, or Muon for matrices), and computes the learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import cos, pi

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.policy.settings import UpdateSettings

NamedParameters = Iterable[tuple[str, Tensor]]


def build_optimizers(
    parameters: NamedParameters, settings: UpdateSettings, muon: type[torch.optim.Muon] = torch.optim.Muon
) -> list[torch.optim.Optimizer]:
    """Builds the optimizers for the parameters that require a gradient."""
    trained = [(name, value) for name, value in parameters if value.requires_grad]
    matrices = [value for name, value in trained if settings.optimizer == "muon" and is_muon_matrix(name, value)]
    matrix_ids = {id(value) for value in matrices}
    others = [value for _, value in trained if id(value) not in matrix_ids]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(muon(matrices, lr=settings.rates.muon, weight_decay=settings.weight_decay, momentum=0.95))
    if others:
        optimizers.append(
            torch.optim.AdamW(others, lr=settings.rates.adamw, betas=settings.betas, weight_decay=settings.weight_decay)
        )
    return optimizers


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scales the gradients down to a norm of at most `limit`; returns the norm over all ranks before."""
    gradients = [value.grad for value in parameters if value.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        norm = _norm_over_ranks([gradient for gradient in gradients if isinstance(gradient, DTensor)])
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        part.mul_(factor.to(part.device))
    return norm


def _norm_over_ranks(gradients: Sequence[DTensor]) -> Tensor:
    """The norm of gradients that are split over ranks, each along some dimensions of its mesh."""
    parts: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        split = tuple(index for index, placement in enumerate(gradient.placements) if not placement.is_replicate())
        parts.setdefault((gradient.device_mesh, split), []).append(gradient.to_local())
    squares = []
    for (mesh, split), locals_ in parts.items():
        square = torch.nn.utils.get_total_norm(locals_).double() ** 2
        for dimension in split:
            torch.distributed.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt().float()


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
