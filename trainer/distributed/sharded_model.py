"""Builds a model whose weights are split over ranks (FSDP2): each rank allocates and reads only its own part."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Replicate, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from trainer.distributed.connect_ranks import ProcessGroupRanks
from trainer.distributed.errors import RankError
from trainer.distributed.expert_parallel import EXPERT_REMEDY, find_experts, keep_experts
from trainer.distributed.settings import DISK_TIMEOUT_S, DistributedSettings
from trainer.distributed.shard_files import ShardFiles
from trainer.distributed.sharded_state import local_slices, with_local_part
from trainer.model import COMPUTE_DEVICE, build_skeleton
from trainer.policy import lora
from trainer.policy.context_parallel import require_divisible_heads
from trainer.policy.logprobs import SHARDED_RUN, decoder_layers_of
from trainer.policy.prefix_forest import CONTEXT
from trainer.policy.settings import PolicyError

ADAPTED_PART = re.compile(r"(?P<layer>.+)\.(?P<kind>base_layer|lora_[AB](?=\.))(\.\w+)?")
"""The names of the parts of a layer with adapters."""
SPLIT_OUTPUT, SPLIT_INPUT = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
WHOLE = "replicated_with_grad_allreduce"
"""The style of norms over single heads, of which each rank has some."""
VOCABULARY = {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
"""How the embeddings and the head are split; they are one matrix if they are tied."""
STYLES = {*SPLIT_OUTPUT, *SPLIT_INPUT, WHOLE, *VOCABULARY.values()}
"""The styles of transformers that were tried with FSDP2, LoRA and the reading of files."""
REMEDY = "set `distributed.tensor_parallel: 1`; more `distributed.ranks` split the weights too"


def find_styles(model: PreTrainedModel, tensor: int) -> dict[str, str]:
    """The style of each layer that is split, by its name. Raises PolicyError if the model cannot be split so."""
    kind = model.config.model_type
    plan: Mapping[str, str] = model.tp_plan or {}
    inner = {name: style for name, style in plan.items() if name.rpartition(".")[2] not in VOCABULARY}
    if not inner:
        raise PolicyError(
            f"`distributed.tensor_parallel`: transformers has no plan for the layers of {kind} models", REMEDY
        )
    if unknown := sorted(set(inner.values()) - STYLES):
        problem = (
            f"`distributed.tensor_parallel`: {kind} models have layers of the style {unknown[0]}, which was never tried"
        )
        raise PolicyError(problem, REMEDY)
    _require_heads(model.config.get_text_config(decoder=True), tensor)
    styles = {path: style for path, _ in model.named_modules() if (style := inner.get(_pattern(path)))}
    layers = dict(model.named_modules())
    for path, style in styles.items():
        _require_even(path, layers[path], style, tensor)
    return styles | dict(_vocabulary_styles(model, tensor))


def require_divisible(model: PreTrainedModel, settings: DistributedSettings, ranks: int) -> None:
    """Raises PolicyError for a model that cannot be divided among ranks as the settings say."""
    tensor, context = settings.tensor_parallel, settings.context_parallel
    if tensor > 1:
        find_styles(model, tensor)
    if context > 1:
        require_divisible_heads(model.config.get_text_config(decoder=True), context, tensor)
    if settings.expert_parallel and not find_experts(model, ranks):
        problem = f"`distributed.expert_parallel`: {model.config.model_type} models have no experts that are stacked"
        raise PolicyError(problem, EXPERT_REMEDY)


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Splits the weights of a model on the meta device, and has its layers exchange what they then lack."""
    styles = find_styles(model, mesh.size())
    if not all(hasattr(ALL_PARALLEL_STYLES[name], "shard_param") for name in styles.values()):
        problem = (
            f"`distributed.tensor_parallel` does not know how transformers {transformers.__version__} splits layers"
        )
        raise PolicyError(problem, f"install transformers 5.24, which it was tried with, or {REMEDY}")
    new: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        if name := _style_of_part(path, module, styles):
            style: Any = ALL_PARALLEL_STYLES[name]
            for parameter, value in list(module.named_parameters(recurse=False)):
                if value not in new:
                    style.shard_param(module, parameter, mesh)
                    new[value] = module.get_parameter(parameter)
                module.register_parameter(parameter, new[value])  # Tied weights stay tied.
            style.install_forward(module, mesh)


def _style_of_part(path: str, module: nn.Module, styles: Mapping[str, str]) -> str | None:
    """The style of a layer, or of a part of one with adapters.

    Their first matrix is split where the layer's input is, and their second where its output is.
    """
    match = ADAPTED_PART.fullmatch(path)
    if match is None:
        return None if hasattr(module, "base_layer") else styles.get(path)
    style, kind = styles.get(match["layer"]), match["kind"]
    return style if style in {"lora_A": SPLIT_INPUT, "lora_B": SPLIT_OUTPUT}.get(kind, STYLES) else None


def _pattern(path: str) -> str:
    """A layer's name as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _vocabulary_styles(model: PreTrainedModel, tensor: int) -> Iterator[tuple[str, str]]:
    """How the embeddings and the head are split; they stay whole if their size is no multiple."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name in VOCABULARY and isinstance(module, nn.Embedding | nn.Linear) and module.weight.shape[0] % tensor == 0:
            yield path, VOCABULARY[name]


def _require_heads(config: Any, tensor: int) -> None:
    heads = config.num_attention_heads
    for name, count in (
        ("attention heads", heads),
        ("key-value heads", getattr(config, "num_key_value_heads", None) or heads),
    ):
        if count % tensor:
            problem = f"`distributed.tensor_parallel: {tensor}` does not divide the model's {count} {name}"
            raise PolicyError(problem, f"set a divisor of {count}, or {REMEDY.removeprefix('set ')}")


def _require_even(path: str, layer: Any, style: str, tensor: int) -> None:
    width = getattr(layer, "out_features" if style in SPLIT_OUTPUT else "in_features", tensor)
    if style != WHOLE and width % tensor:
        raise PolicyError(
            f"`distributed.tensor_parallel: {tensor}` does not divide the {width} columns of {path}", REMEDY
        )


SPLIT_REMEDY = "train it in one process, without `--ranks`"
FORWARD_METHOD = "_compute_in_pass"


def build_sharded_model(
    folder: Path, ranks: ProcessGroupRanks, dtype: torch.dtype, prepare: Callable[[PreTrainedModel], object]
) -> PreTrainedModel:
    """The model in a folder. `prepare` may add adapters and freeze weights before they are split."""
    model = build_skeleton(folder)
    prepare(model)
    new = _remove_weights(model)
    setattr(model, COMPUTE_DEVICE, ranks.device)
    setattr(model, CONTEXT, ranks.context)
    if ranks.context:  # A teacher may have other heads.
        config = model.config.get_text_config(decoder=True)
        require_divisible_heads(config, ranks.context.size, ranks.settings.tensor_parallel)
    parameters: dict[int, nn.Parameter] = {}
    state: dict[str, Tensor] = {}
    with ShardFiles(folder, model) as files:
        if ranks.tensor_mesh is not None:
            split_layers(model, ranks.tensor_mesh)
        kept = keep_experts(model, ranks.data_mesh) if ranks.settings.expert_parallel else set()
        _shard(model, ranks, dtype, kept)
        for name, value in model.named_parameters(remove_duplicate=False):
            if id(value) not in parameters:
                ranks.report(f"reading {name}", DISK_TIMEOUT_S)
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


def _shard(model: PreTrainedModel, ranks: ProcessGroupRanks, dtype: torch.dtype, kept: set[nn.Parameter]) -> None:
    """Splits each decoder layer as a unit, which is gathered for its own computation only, and the rest as another.
    What is kept on its rank is never gathered."""
    layers = decoder_layers_of(model)
    if not layers:
        problem = f"{model.config.model_type} models have no list of decoder layers that could be split over ranks"
        raise PolicyError(problem, SPLIT_REMEDY)
    half = dtype != torch.float32
    options: dict[str, Any] = {
        "mesh": ranks.data_mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if half
        else MixedPrecisionPolicy(),
        "ignored_params": kept,
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
    tensor = with_local_part(value, part.contiguous(), ranks.weights_device)
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
