"""Float32 master weights of a model that computes in bfloat16: optimizers update them, and the model gets them rounded.

An update is often smaller than what bfloat16 can add to a weight, and so are gradients of single micro-batches: both
are accumulated in float32. Weights that are split over ranks need none: FSDP keeps them in float32, and rounds what it
gathers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.policy.settings import UpdateSettings


def compute_dtype(settings: UpdateSettings, device: torch.device) -> torch.dtype:
    """What the model computes in."""
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32


class MasterWeights:
    """The masters of a module's trained weights; where it computes in float32, these are the weights themselves."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Rounds the module's weights to the dtype."""
        self._module = module
        self._masters: dict[Tensor, Tensor] = {}
        add_gradient = partial(MasterWeights._add_gradient, proxy(self))  # A weight that held it would hold itself.
        for value in module.parameters():
            if value.dtype == dtype or isinstance(value, DTensor):
                continue
            whole = value.data
            value.data = whole.to(dtype)
            if value.requires_grad:
                self._masters[value] = nn.Parameter(whole)
                value.register_post_accumulate_grad_hook(add_gradient)  # type: ignore[no-untyped-call]

    def _add_gradient(self, value: Tensor) -> None:
        """Moves a weight's gradient to its master."""
        gradient, value.grad, master = value.grad, None, self._masters[value]
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad += gradient

    def named(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The masters of named weights; other tensors as they are."""
        return {name: self._masters.get(value, value) for name, value in tensors}

    @property
    def state_dict(self) -> dict[str, Tensor]:
        """The module's state, with masters for weights."""
        named = self.named(self._module.state_dict(keep_vars=True).items())
        return {name: value.detach() for name, value in named.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copies named weights into their masters, and these into the module."""
        own = self.state_dict
        for name, value in state.items():
            own[name].copy_(value)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Gives the module what its masters have become."""
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    @torch.no_grad()
    def measure_change(self) -> dict[str, float]:
        """The share of the model's numbers that `round` is about to change. With small rates it is small, and servers
        would need no others."""
        changed = [(master.to(value.dtype) != value).sum() for value, master in self._masters.items()]
        total = sum(value.numel() for value in self._masters)
        return {"update/changed": int(torch.stack(changed).sum()) / total} if total else {}
