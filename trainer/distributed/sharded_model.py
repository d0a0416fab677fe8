"""Builds a model whose weights are split over ranks (FSDP2): each rank allocates and reads only its own part."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
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
from trainer.distributed.sharded_state import local_slices
from trainer.distributed.tensor_parallel import split_layers
from trainer.model import COMPUTE_DEVICE, build_skeleton
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
    setattr(model, COMPUTE_DEVICE, ranks.device)
    parameters: dict[int, nn.Parameter] = {}
    state: dict[str, Tensor] = {}
    with ShardFiles(folder, model) as files:
        if ranks.tensor_mesh is not None:
            split_layers(model, ranks.tensor_mesh)
        _shard(model, ranks, dtype)
        for name, value in model.named_parameters(remove_duplicate=False):
            if id(value) not in parameters:
                ranks.report(f"reading {name}", ranks.settings.disk_timeout_s)
                parameters[id(value)] = _load_part(name, value, new, files, ranks)
            state[name] = parameters[id(value)]
    ranks.report("finishing the model")
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
        "mesh": ranks.data_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if half
        else MixedPrecisionPolicy(),
    }
    if ranks.settings.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
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
    """This rank's part of a weight."""
    sharded: Any = value
    local: Tensor = sharded.to_local()
    place = local_slices(sharded)
    file_name = name.replace(".base_layer.", ".")
    part = new[name][place] if name in new else files.read(file_name, value.shape, place)
    if part.shape != local.shape:
        raise PolicyError(f"{name} is split into {tuple(local.shape)}, not {tuple(part.shape)}", SPLIT_REMEDY)
    tensor = DTensor.from_local(
        part.contiguous().to(ranks.weights_device),
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return nn.Parameter(tensor, requires_grad=value.requires_grad)


def replicate(value: Tensor, ranks: ProcessGroupRanks) -> Tensor:
    """A small weight that every rank has as a whole."""
    return distribute_tensor(value, ranks.data_mesh, [Replicate()] * ranks.data_mesh.ndim, src_data_rank=None)


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
