"""The optimizer, and the learning rates of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, cos, pi

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.policy.settings import UpdateSettings

RATES = ((50_000_000, 1e-4), (500_000_000, 1e-5), (2_000_000_000, 2e-6))
"""Parameters that a model has fewer than, and the learning rate with which all of its weights are trained."""
LARGE_MODEL_RATE = 1e-6
LORA_FACTOR = 10
"""Adapters need a larger learning rate than all weights, whatever their rank."""
WARMUP_STEPS = 10
"""Steps of warm-up with a chosen learning rate, but at most a tenth of the run."""
USED_RANGE = 30
"""Rates beyond the default times or divided by this are told: with them, models diverge or learn nothing."""


def default_rate(parameters: int, *, is_lora: bool) -> float:
    """The learning rate for a model of this size."""
    rate = next((rate for size, rate in RATES if parameters < size), LARGE_MODEL_RATE)
    return rate * LORA_FACTOR if is_lora else rate


def choose_rates(update: UpdateSettings, parameters: int, steps: int | None = None) -> UpdateSettings:
    """The settings with every rate that they leave open; `steps` are those of the run."""
    warmup = update.warmup_steps
    if warmup is None:
        most = WARMUP_STEPS if steps is None else ceil(steps / 10)
        warmup = min(WARMUP_STEPS, most) if update.lr is None else 0
    lr = default_rate(parameters, is_lora=update.lora is not None) if update.lr is None else update.lr
    chosen = update.model_copy(update={"lr": lr, "warmup_steps": warmup, "decay_steps": update.decay_steps or steps})
    if chosen.critic is None:
        return chosen
    return chosen.model_copy(update={"critic": chosen.critic.model_copy(update={"lr": chosen.critic_rate})})


def keep_choices(update: UpdateSettings, saved: UpdateSettings) -> UpdateSettings:
    """The settings of a run that is resumed: what they leave open, and is chosen at a start, is as the run has it."""
    chosen = ("lr", "warmup_steps", "decay_steps", "micro_batch_tokens")
    names = [name for name in chosen if getattr(update, name) is None]
    critic = update.critic
    if critic and critic.lr is None and saved.critic:
        critic = critic.model_copy(update={"lr": saved.critic.lr})
    return update.model_copy(update={name: getattr(saved, name) for name in names} | {"critic": critic})


def describe_rates(given: UpdateSettings, chosen: UpdateSettings, parameters: int, *, is_resumed: bool = False) -> str:
    """The learning rate of a run, and whether it was given, is that of the resumed run, or the default."""
    warmup = f"after {chosen.warmup_steps} steps of warm-up" if chosen.warmup_steps else "without warm-up"
    source = f"the default for {describe_training(chosen, parameters)}"
    if given.lr is not None:
        source = "that of the run, which is resumed" if is_resumed else "`update.lr`"
    return f"learning rate {chosen.rate:g} {warmup}: {source}"


def find_unusual_rate(update: UpdateSettings, parameters: int) -> tuple[str, str] | None:
    """A problem and its remedy: a learning rate that is far from those that models of this size are trained with."""
    typical, rate = default_rate(parameters, is_lora=update.lora is not None), update.rate
    if typical / USED_RANGE <= rate <= typical * USED_RANGE:
        return None
    effect = "with so large a rate the model forgets what it can" if rate > typical else "with so small a rate"
    effect += "" if rate > typical else " nothing is learned"
    problem = f"update.lr is {rate:g}: {effect}"
    low, high = typical / USED_RANGE, typical * USED_RANGE
    what = describe_training(update, parameters)
    remedy = f"use {low:.1g} to {high:.1g} for {what}; left out, it is {typical:g}"
    return problem, remedy


def describe_training(update: UpdateSettings, parameters: int) -> str:
    """The size of the model, and what of it is trained."""
    return f"{describe_size(parameters)} parameters, {'with LoRA' if update.lora else 'all of them trained'}"


def describe_size(parameters: int) -> str:
    """A number of parameters as people say it."""
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if parameters >= size:
            return f"{parameters / size:.3g} {name}"
    return f"{parameters:,}"


OptimizerMaker = Callable[[Mapping[str, Tensor], UpdateSettings], torch.optim.Optimizer]
"""Makes the optimizer of named parameters."""
LR_RATIO = "lr_ratio"
"""The key of a parameter group whose learning rate is a multiple of that of the settings."""


def build_optimizer(parameters: Mapping[str, Tensor], settings: UpdateSettings) -> torch.optim.Optimizer:
    """AdamW for the parameters that require a gradient."""
    return torch.optim.AdamW(
        [value for value in parameters.values() if value.requires_grad],
        lr=settings.rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scales the gradients down to a norm of at most `limit`; returns the norm over all ranks before."""
    gradients = [value.grad for value in parameters if value.grad is not None]
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        norm = _norm_over_ranks([gradient for gradient in gradients if isinstance(gradient, DTensor)])
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    parts = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    if parts:
        torch._foreach_mul_(parts, factor.to(parts[0].device))
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


def learning_rate_factor(step: int, settings: UpdateSettings) -> float:
    """The learning rate at a step, as a share of the full rate: warm-up, then constant or falling."""
    warmup = settings.warmup_steps or 0
    if step < warmup:
        return (step + 1) / warmup
    if settings.lr_scheduler == "constant" or settings.decay_steps is None:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, settings.decay_steps - warmup))
    if settings.lr_scheduler == "cosine":
        progress = (1.0 - cos(pi * progress)) / 2
    return 1.0 - (1.0 - settings.min_lr_ratio) * progress
