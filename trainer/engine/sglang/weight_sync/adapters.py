"""Weight sync by LoRA adapters alone: the servers have the model, and each version is an adapter of its own.

Requests name the adapter that they are sampled with, so a turn keeps its version to its end, and adapters that no
request uses any more are unloaded. SGLang keys its prefix cache by adapter, too.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from anyio import to_thread

from trainer.engine.base import Adapters, AdapterShape
from trainer.engine.sglang.http_client import RequestRefused
from trainer.engine.sglang.server_features import LOAD_ADAPTERS, UNLOAD_ADAPTER, ServerFeatures
from trainer.engine.sglang.weight_sync.base import SyncTarget, find_dtype, load_timeout_s, post_checked
from trainer.engine.sglang.weight_sync.flat_bucket import LOAD_FORMAT, flatten_bucket
from trainer.pretrained import read_json

LoraPublish = Literal["auto", "adapters", "merged"]
TRIED_MODELS = ("llama", "qwen2", "qwen3")
"""Model types whose adapters SGLang applies as the trainer does; `tests/sglang` compares the last one."""
MODULES = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""The layers of these models that SGLang can adapt."""
LORA_FLAG = "--enable-lora"
SLOTS_FLAG = ("--max-loras-per-batch", "4")
"""Adapters that a server computes with at the same time, none included: the latest, and those of turns that began
before it."""
PREFIX = "mtrl"
"""Of the names of our adapters."""


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """Whether adapters are published alone, and why not if that was to be seen."""

    publish: LoraPublish = "merged"
    shape: AdapterShape | None = None
    problem: str = ""
    """Why adapters have to be merged, as far as it is known before any server is asked."""

    @property
    def is_tried(self) -> bool:
        """Whether servers are asked for adapters."""
        return self.publish != "merged" and self.shape is not None and not self.problem

    @property
    def server_flags(self) -> tuple[str, ...]:
        """The flags of a server that is to take adapters."""
        if not self.is_tried or self.shape is None:
            return ()
        rank = ("--max-lora-rank", str(self.shape.rank))
        return (LORA_FLAG, *rank, "--lora-target-modules", *self.shape.modules, *SLOTS_FLAG)

    def find_problem(self, servers: Sequence[ServerFeatures]) -> str:
        """Why these servers cannot take the adapters; empty if they can."""
        if self.problem or self.shape is None:
            return self.problem
        for server in servers:
            lacking = [name for name in self.shape.modules if not {name, "all"} & server.lora_modules]
            if not server.lora_rank:
                return f"a server was started without {LORA_FLAG}"
            if server.lora_rank < self.shape.rank:
                return f"a server was started with --max-lora-rank {server.lora_rank}, less than {self.shape.rank}"
            if lacking:
                return f"a server was started with --lora-target-modules that lack {lacking[0]}"
        return ""


NO_ADAPTERS = AdapterPlan()


def plan_adapters(publish: LoraPublish, shape: AdapterShape | None, model: Path, *, lends_memory: bool) -> AdapterPlan:
    """The plan for a model's folder. `lends_memory`: the servers' weights are lost at each update."""
    if shape is None:
        return NO_ADAPTERS
    problem = ""
    if lends_memory:
        problem = "with `serving.placement: together` servers release the model at each update"
    elif others := sorted({*shape.modules} - MODULES):
        problem = f"SGLang has no adapters for {others[0]}"
    elif publish == "auto":
        kind = read_json(model / "config.json").get("model_type", "unknown")
        if kind not in TRIED_MODELS:
            problem = f"SGLang's adapters were not tried with {kind} models; `serving.lora: adapters` tries them"
    return AdapterPlan(publish, shape, problem)


async def load_adapters(target: SyncTarget, adapters: Adapters, name: str) -> int:
    """Loads adapters under a name that no others ever had; returns their bytes."""
    tensors = await to_thread.run_sync(_convert, adapters, target.features.dtype)
    body = await to_thread.run_sync(_load_body, tensors, adapters.shape, name, target.features.ranks)
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        await post_checked(target.client, LOAD_ADAPTERS, body, within=load_timeout_s(len(body)))
    except RequestRefused as error:
        if "already loaded" not in str(error):  # By an attempt whose answer was lost.
            raise
    return size


async def unload_adapter(target: SyncTarget, name: str) -> None:
    """Unloads adapters that no request uses; SGLang would wait for it."""
    try:
        await post_checked(target.client, UNLOAD_ADAPTER, {"lora_name": name})
    except RequestRefused as error:
        if "does not exist" not in str(error):  # The server was restarted since.
            raise


def _convert(adapters: Adapters, dtype: str) -> dict[str, torch.Tensor]:
    """The tensors in the servers' precision, which computes in it."""
    given = find_dtype(dtype) or torch.float32
    return {name: tensor.detach().to("cpu", given) for name, tensor in adapters.items()}


def _load_body(tensors: dict[str, torch.Tensor], shape: AdapterShape, name: str, ranks: int) -> bytes:
    flat = base64.b64encode(pickle.dumps(flatten_bucket(list(tensors.items())).content)).decode()
    config = {
        "peft_type": "LORA",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": list(shape.modules),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    body = {"lora_name": name, "config_dict": config, "serialized_named_tensors": [flat] * ranks}
    return json.dumps(body | LOAD_FORMAT).encode()
