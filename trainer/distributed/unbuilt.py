"""Refuses settings for ways to split a model that the trainer does not have, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECTIONS = ("distributed", "update")
"""Where such a key may stand, besides the top of a run file."""
SHORTER_ROWS = "set `update.checkpointing: true` or `distributed.tensor: 2`, or lower `limits.rollout_tokens`"
UNBUILT = (
    (
        ("tensor_parallel", "tensor_model_parallel", "tp"),
        "tensor parallelism has another name here",
        "set `distributed.tensor` for the trainer, or for SGLang servers `serving.options: [--tp, '2']`",
    ),
    (
        ("sequence", "sequence_parallel", "ulysses_sequence_parallel", "ulysses", "context_parallel", "sp", "cp"),
        "the trainer has no sequence parallelism, so that a row has to fit one device or the ranks of `tensor`",
        f"leave it out and {SHORTER_ROWS}",
    ),
    (
        ("cpu_offload", "offload_policy", "param_offload", "optimizer_offload", "optimizer_cpu_offload",
         "offload_optimizer", "offload_model", "grad_offload"),
        "offloading to the host's memory has another name here",
        "set `distributed.offload: true`, which keeps weights, gradients and optimizer there together",
    ),
    (
        ("pipeline", "pipeline_parallel", "pipeline_model_parallel", "pp"),
        "the trainer has no pipeline parallelism, since its ranks split every layer (`distributed.shard`)",
        "leave it out and use more `distributed.ranks`",
    ),
    (
        ("expert", "expert_parallel", "expert_model_parallel", "ep"),
        "the trainer has no expert parallelism, since its ranks split experts as all weights (`distributed.shard`)",
        "leave it out and use more `distributed.ranks`",
    ),
)  # fmt: skip
"""Names of settings, what is missing, and the remedy."""
BY_NAME = {name: (problem, remedy) for names, problem, remedy in UNBUILT for name in names}


def refuse_unbuilt(settings: Any) -> None:
    """Raises ValueError for the first key that asks for what is not built; whatever its value, 1 and false included."""
    if not isinstance(settings, Mapping):
        return
    sections = {"": settings, **{f"{name}.": settings.get(name) for name in SECTIONS}}
    for where, section in sections.items():
        for key in section if isinstance(section, Mapping) else ():
            name = str(key).lower().replace("-", "_").removesuffix("_degree").removesuffix("_size")
            if name in BY_NAME:
                problem, remedy = BY_NAME[name]
                raise ValueError(f"`{where}{key}`: {problem}; {remedy}")
