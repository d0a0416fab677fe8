"""Tensor parallelism: splits the matrices of each layer over ranks by the plan that transformers has for a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from trainer.policy.errors import PolicyError

ADAPTED_PART = re.compile(r"(?P<layer>.+)\.(?P<kind>base_layer|lora_[AB](?=\.))(\.\w+)?")
"""The names of the parts of a layer with adapters."""
SPLIT_OUTPUT, SPLIT_INPUT = ("colwise", "colwise_gather_output"), ("rowwise", "rowwise_split_input")
WHOLE = "replicated_with_grad_allreduce"
"""The style of norms over single heads, of which each rank has some."""
VOCABULARY = {"embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
"""How the embeddings and the head are split; they are one matrix if they are tied."""
STYLES = {*SPLIT_OUTPUT, *SPLIT_INPUT, WHOLE, *VOCABULARY.values()}
"""The styles of transformers that were tried with FSDP2, LoRA and the reading of files."""
REMEDY = "set `distributed.tensor: 1`; more `distributed.ranks` split the weights too"


def find_styles(model: PreTrainedModel, tensor: int) -> dict[str, str]:
    """The style of each layer that is split, by its name. Raises PolicyError if the model cannot be split so."""
    kind = model.config.model_type
    plan: Mapping[str, str] = model.tp_plan or {}
    inner = {name: style for name, style in plan.items() if name.rpartition(".")[2] not in VOCABULARY}
    if not inner:
        raise PolicyError(f"`distributed.tensor`: transformers has no plan for the layers of {kind} models", REMEDY)
    if unknown := sorted(set(inner.values()) - STYLES):
        problem = f"`distributed.tensor`: {kind} models have layers of the style {unknown[0]}, which was never tried"
        raise PolicyError(problem, REMEDY)
    _require_heads(model.config.get_text_config(decoder=True), tensor)
    styles = {path: style for path, _ in model.named_modules() if (style := inner.get(_pattern(path)))}
    layers = dict(model.named_modules())
    for path, style in styles.items():
        _require_even(path, layers[path], style, tensor)
    return styles | dict(_vocabulary_styles(model, tensor))


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Splits the weights of a model on the meta device, and has its layers exchange what they then lack."""
    styles = find_styles(model, mesh.size())
    if not all(hasattr(ALL_PARALLEL_STYLES[name], "shard_param") for name in styles.values()):
        problem = f"`distributed.tensor` does not know how transformers {transformers.__version__} splits layers"
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
            problem = f"`distributed.tensor: {tensor}` does not divide the model's {count} {name}"
            raise PolicyError(problem, f"set a divisor of {count}, or {REMEDY.removeprefix('set ')}")


def _require_even(path: str, layer: Any, style: str, tensor: int) -> None:
    width = getattr(layer, "out_features" if style in SPLIT_OUTPUT else "in_features", tensor)
    if style != WHOLE and width % tensor:
        raise PolicyError(f"`distributed.tensor: {tensor}` does not divide the {width} columns of {path}", REMEDY)
