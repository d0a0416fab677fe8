"""Builds a model whose weights are split over ranks (FSDP2): each rank allocates and reads only its own part."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers import PreTrainedModel

from trainer.distributed.connect_ranks import ProcessGroupRanks
from trainer.distributed.errors import RankError
from trainer.distributed.shard_files import ShardFiles
from trainer.model import build_skeleton
from trainer.policy import lora
from trainer.policy.errors import PolicyError
from trainer.policy.logprobs import SHARDED_RUN
from trainer.policy.vision_inputs import language_model_of

SPLIT_REMEDY = "train it in one process, without `--ranks`"
FORWARD_METHOD = "_compute_in_pass"


def build_sharded_model(
    folder: Path,
    ranks: ProcessGroupRanks,
    dtype: torch.dtype,
    prepare: Callable[[PreTrainedModel], None] = lambda _: None,
) -> PreTrainedModel:
    """The model in a folder. `prepare` may add adapters and freeze weights before they are split."""
    model = build_skeleton(folder)
    prepare(model)
    new = _remove_weights(model)
    _shard(model, ranks, dtype)
    parameters: dict[int, nn.Parameter] = {}
    state: dict[str, Tensor] = {}
    with ShardFiles(folder, model) as files:
        for name, value in model.named_parameters(remove_duplicate=False):
            if id(value) not in parameters:
                parameters[id(value)] = _load_part(name, value, new, files, ranks)
            state[name] = parameters[id(value)]
    model.load_state_dict(state, strict=False, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(ranks.device))
    _attach_run_pass(model)
    model.train(False)
    return model


def require_torch() -> None:
    """Refuses a torch that cannot split a model as it is done here."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise RankError(
            f"torch {torch.__version__} is too old for ranks", "install torch 2.13, which they were tried with"
        )


def _remove_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Moves the weights to the meta device; returns those that are in no file: new adapters."""
    new, replaced = {}, {}
    for path, module in model.named_modules():
        for name, value in list(module.named_parameters(recurse=False)):
            full_name = f"{path}.{name}" if path else name
            if lora.MARK in full_name:
                new[full_name] = value.detach().clone()
            if id(value) not in replaced:
                replaced[id(value)] = value, nn.Parameter(value.detach().to("meta"), requires_grad=value.requires_grad)
            setattr(module, name, replaced[id(value)][1])
    return new


def _shard(model: PreTrainedModel, ranks: ProcessGroupRanks, dtype: torch.dtype) -> None:
    """Splits each decoder layer as a unit, which is gathered for its own computation only, and the rest as another."""
    decoder: Any = language_model_of(model)
    layers = getattr(getattr(decoder, "base_model", decoder), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        problem = f"{model.config.model_type} models have no list of decoder layers that could be split over ranks"
        raise PolicyError(problem, SPLIT_REMEDY)
    half = dtype != torch.float32
    options: dict[str, Any] = {
        "mesh": ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if half
        else MixedPrecisionPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **options)
        ranks.clock.watch(layer)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Each rank's loss is its part of the whole step's, so gradients are summed. Gloo has no scaled sums.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    root: Any = model
    root.set_reduce_scatter_unused_params(True)  # A rank may have no images, or nothing that is scored.


def _load_part(
    name: str, value: nn.Parameter, new: dict[str, Tensor], files: ShardFiles, ranks: ProcessGroupRanks
) -> nn.Parameter:
    """This rank's rows of a weight."""
    sharded: Any = value
    local: Tensor = sharded.to_local()
    rows = shard_rows(value.shape[0], ranks)
    file_name = name.replace(".base_layer.", ".")
    part = new[name][rows] if name in new else files.read(file_name, value.shape, rows)
    if part.shape != local.shape:
        raise PolicyError(f"{name} is split into {tuple(local.shape)}, not {tuple(part.shape)}", SPLIT_REMEDY)
    tensor = DTensor.from_local(
        part.contiguous().to(ranks.device),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return nn.Parameter(tensor, requires_grad=value.requires_grad)


def shard_rows(rows: int, ranks: ProcessGroupRanks) -> slice:
    """The rows of a weight that this rank has."""
    parts = ranks.mesh.size(ranks.mesh.ndim - 1)
    size = -(-rows // parts)
    start = min(rows, size * ranks.mesh.get_local_rank("shard"))
    return slice(start, min(rows, start + size))


def replicate(value: Tensor, ranks: ProcessGroupRanks) -> Tensor:
    """A small weight that every rank has as a whole."""
    return distribute_tensor(value, ranks.mesh, [Replicate()] * ranks.mesh.ndim)


def _attach_run_pass(model: Any) -> None:
    """Lets a function that calls parts of the model run as a forward pass of the whole."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # It is not written to.
    setattr(model, FORWARD_METHOD, lambda compute, *inputs: compute(*inputs))
    register_fsdp_forward_method(model, FORWARD_METHOD)
    compute_in_pass = getattr(model, FORWARD_METHOD)

    def run_pass(compute: Callable[..., Any], *inputs: Any) -> Any:
        output = compute_in_pass(compute, *inputs)
        if not torch.is_grad_enabled():  # No backward pass follows that would release the gathered weights.
            model.reshard()
        return output

    setattr(model, SHARDED_RUN, run_pass)
