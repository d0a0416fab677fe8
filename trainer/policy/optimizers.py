"""Maps are moved by Muon where asked, all else by AdamW, and every rate rises and falls together."""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, pi

import torch
from torch import Tensor

from trainer.policy.settings import UpdateSettings

Named = Iterable[tuple[str, Tensor]]


def optimizers(parameters: Named, settings: UpdateSettings) -> list[torch.optim.Optimizer]:
    learned = [(name, value) for name, value in parameters if value.requires_grad]
    matrices = [value for name, value in learned if settings.optimizer == "muon" and is_map(name, value)]
    known = {id(value) for value in matrices}
    others = [value for _, value in learned if id(value) not in known]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, momentum=0.95))
    if others:
        made.append(torch.optim.AdamW(others, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay))
    return made


def is_map(name: str, value: Tensor) -> bool:
    """Embeddings and the head are tables, not maps; Muon is for maps."""
    return value.ndim == 2 and "embed" not in name and "lm_head" not in name


def share(step: int, settings: UpdateSettings) -> float:
    """Of the full rate, at a step."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    if settings.steps is None:
        return 1.0
    gone = min(1.0, (step - settings.warmup) / max(1, settings.steps - settings.warmup))
    if settings.fall == "cosine":
        gone = (1.0 - cos(pi * gone)) / 2
    return 1.0 - (1.0 - settings.floor) * gone
