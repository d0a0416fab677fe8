"""Muon for matrices that are split over ranks: each is gathered, orthogonalised on every rank, and stepped by parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.distributed.sharded_state import gather_tensor, local_part, local_slices, with_local_part


class ShardedMuon(torch.optim.Muon):
    """torch's Muon on this rank's parts, with momentum of this rank's part."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Every rank makes it for the same matrices in the same order. A rank holds one whole matrix at a time."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                gradient, momentum = local_part(parameter.grad), local_part(state["momentum_buffer"])
                momentum.lerp_(gradient, 1 - group["momentum"])
                direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                device = torch.device(parameter.device_mesh.device_type)
                change = _orthogonal_step(gather_tensor(with_local_part(parameter, direction, device)), group)
                weights = local_part(parameter)
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.add_(change[local_slices(parameter)].to(weights.device))


def _orthogonal_step(direction: Tensor, group: Mapping[str, Any]) -> Tensor:
    """What torch's Muon adds to a whole matrix for a direction that has its momentum already."""
    change = torch.zeros_like(direction)
    change.grad = direction
    kept = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([change], momentum=0.0, nesterov=False, weight_decay=0.0, **kept).step()  # type: ignore[no-untyped-call]
    return change
