"""Gathers sharded tensors to rank 0, and scatters them from there: one tensor after the other, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.distributed.connect_ranks import ProcessGroupRanks
from trainer.policy.shards import dump_groups, restore_groups

EMPTY = torch.empty(0)


def gather_tensor(value: Tensor, *, keep: bool = True) -> Tensor:
    """The whole tensor; an empty one on ranks that do not keep it."""
    whole: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole if keep else EMPTY


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()


def local_slices(value: DTensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    sizes, starts = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def with_local_part(value: Tensor, local: Tensor, device: torch.device) -> Tensor:
    """A tensor that is split like another one, with a part of its own, on a device."""
    if not isinstance(value, DTensor):
        return local
    part = local.to(device)
    options: dict[str, Any] = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(part, value.device_mesh, value.placements, **options)


def scatter_model(
    model: nn.Module | Mapping[str, Tensor], whole: Mapping[str, Tensor], ranks: ProcessGroupRanks
) -> None:
    """Copies whole weights of rank 0 into each rank's part. Names that rank 0 does not have stay as they are."""
    state = model.state_dict() if isinstance(model, nn.Module) else model
    present = ranks.gather([name in whole for name in state])[0]
    for (name, value), is_present in zip(state.items(), present, strict=True):
        if is_present:
            _scatter_into(value, whole.get(name), ranks)


def scatter_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], ranks: ProcessGroupRanks) -> None:
    """Restores an optimizer from the state that rank 0 read."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    states: Mapping[int, Mapping[str, Tensor]] = saved.get("state", {})
    shapes = {
        str(index): {name: tuple(value.shape) for name, value in state.items()} for index, state in states.items()
    }
    names, groups = ranks.gather([shapes, dump_groups(saved.get("param_groups", []))])[0]
    for index, tensors in names.items():
        parameter = parameters[int(index)]
        for name, shape in tensors.items():
            source = states[int(index)][name] if states else None
            is_whole = tuple(shape) == tuple(parameter.shape)
            target = torch.zeros_like(parameter.detach()) if is_whole else torch.zeros(shape)
            _scatter_into(target, source, ranks)
            optimizer.state[parameter][name] = target
    restore_groups(optimizer, groups)


@torch.no_grad()
def _scatter_into(target: Tensor, source: Tensor | None, ranks: ProcessGroupRanks) -> None:
    """Sends a whole tensor from rank 0 to all, of which each keeps its part."""
    ranks.report("scattering a checkpoint")
    whole = (torch.empty(target.shape) if source is None else source.to(torch.float32)).to(ranks.device).contiguous()
    dist.broadcast(whole, 0)
    if isinstance(target, DTensor):
        target.to_local().copy_(whole[local_slices(target)])
    else:
        target.copy_(whole)
