"""The policy and its critic with weights, gradients and optimizer split over ranks. Every method runs on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.distributed.connect_ranks import ProcessGroupRanks
from trainer.distributed.settings import DISK_TIMEOUT_S
from trainer.distributed.sharded_model import SPLIT_REMEDY, build_sharded_model, replicate
from trainer.distributed.sharded_state import (
    gather_tensor,
    local_part,
    scatter_model,
    scatter_optimizer,
    with_local_part,
)
from trainer.distributed.write_shards import Digests, begin_writing
from trainer.engine.base import Adapters
from trainer.engine.host_copies import HostCopies
from trainer.model import load_model
from trainer.policy import lora
from trainer.policy.critic import Critic
from trainer.policy.logprobs import LogprobReader, Reference
from trainer.policy.master_weights import compute_dtype
from trainer.policy.policy import STATE_FILE, Policy, WithoutAdapters, loading_checkpoint, select_trained_weights
from trainer.policy.settings import CriticSettings, PolicyError, UpdateSettings
from trainer.policy.shards import write_policy_file
from trainer.vision.image_processor import ImageProcessor

State = dict[str, Any]
BASE = ".base_layer."
"""In the names of weights whose layers have adapters."""


class ShardedPolicy(Policy):
    """A policy of which each rank has a part."""

    ranks: ProcessGroupRanks

    def __init__(
        self,
        folder: Path,
        settings: UpdateSettings,
        ranks: ProcessGroupRanks,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self.ranks, self._source = ranks, folder
        self._kept = HostCopies()
        """This rank's part of the weights that were published last."""
        self._dtype = compute_dtype(settings, ranks.device)
        prepare = partial(select_trained_weights, settings=settings, image_processor=image_processor)
        model = build_sharded_model(folder, ranks, self._dtype, prepare)
        super().__init__(model, settings, folder, image_processor)
        self._require_shared_prefixes(self.logprob_reader)

    @property
    def whole_model(self) -> None:
        """None: this rank has only a part of it."""
        return None

    def load_reference(self, teacher: Path | None = None) -> Reference:
        if self.settings.lora and teacher is None:
            return WithoutAdapters(self)
        model = self._build_model(lambda model: model.requires_grad_(False), teacher)
        reader = LogprobReader(model, self.settings.logits_chunk, self._dtype, self.image_processor)
        self._require_shared_prefixes(reader)
        return reader

    def _require_shared_prefixes(self, reader: LogprobReader) -> None:
        if reader.fallback_reason:
            problem = f"the model cannot be split over {self.ranks.size} ranks: {reader.fallback_reason}"
            raise PolicyError(problem, SPLIT_REMEDY)

    def gather_weights(self) -> Mapping[str, Tensor]:
        """The whole weights with adapters merged, one after the other; empty on other ranks than 0."""
        whole = dict(self.gather_bucket(list(self.untied_sizes)))
        first = {id(value): name for name, value in self._published_tensors.items() if name in whole}
        return {name: whole[first[id(value)]] for name, value in self._published_tensors.items() if id(value) in first}

    @property
    def published_names(self) -> list[str]:
        """The names of the weights that engines get, tied ones included."""
        return list(self._published_tensors)

    @property
    def untied_sizes(self) -> dict[str, int]:
        """The names and bytes of the weights that engines get; of tied ones, the first."""
        tensors = self._published_tensors
        first = {id(value): name for name, value in reversed(list(tensors.items()))}
        sizes = {name: value.numel() * self._published_dtype(value).itemsize for name, value in tensors.items()}
        return {name: sizes[name] for name, value in tensors.items() if first[id(value)] == name}

    @cached_property
    def _published_tensors(self) -> Mapping[str, Tensor]:
        """This rank's part of what engines get, by its name without adapters; tied names have the same object."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        tensors = {name: parameters.get(name, value) for name, value in self.model.state_dict().items()}
        return {name.replace(BASE, "."): value for name, value in tensors.items() if lora.MARK not in name}

    def _published_dtype(self, value: Tensor) -> torch.dtype:
        """What engines get: weights as the model computes with them, and buffers as they are."""
        return self._dtype if isinstance(value, nn.Parameter) else value.dtype

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Copies this rank's part of what is trained to the host's memory, where further steps do not change it."""
        trained = ((name, value) for name, value in self.model.named_parameters() if value.requires_grad)
        self._kept.take((name, local_part(value)) for name, value in trained)

    @torch.no_grad()
    def gather_bucket(self, names: Sequence[str], *, kept: bool = False) -> list[tuple[str, Tensor]]:
        """Whole weights with adapters merged, as they are now or as they were kept; none on other ranks than 0."""
        keep = self.ranks.rank == 0
        values = []
        for name in names:  # In the same order on all ranks. The others drop each at once.
            layer, value = self._adapted.get(name), self._published_tensors[name]
            dtype = self._published_dtype(value)
            if layer is None:
                value = self._gather(value, name, kept, keep, dtype)
            else:
                value = self._gather(value, _base_name(name), kept, keep)
                value = self._add_adapters(value, name.removesuffix(".weight"), layer, kept, keep).to(dtype)
            values.append((name, value))
        return values if keep else []

    @torch.no_grad()
    def gather_adapters(self) -> Adapters:
        """The whole adapters without the model; without tensors on other ranks than 0."""
        keep = self.ranks.rank == 0
        named = [(name, value) for name, value in self.model.named_parameters() if lora.MARK in name]
        whole = [(lora.file_name(name), self._gather(value, name, kept=False, keep=keep)) for name, value in named]
        return Adapters(lora.adapter_shape(self.model), dict(whole) if keep else {})

    @cached_property
    def _adapted(self) -> Mapping[str, Any]:
        """The layers that have adapters, by the names of their weights."""
        layers = {name: module for name, module in self.model.named_modules() if hasattr(module, "lora_A")}
        return {f"{name}.weight": layer for name, layer in layers.items()}

    def _gather(self, value: Tensor, name: str, kept: bool, keep: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        """A whole tensor, given this rank's part of it, which is rounded before it is sent."""
        is_kept = kept and name in self._kept
        if is_kept or self.ranks.weights_device != self.ranks.device:
            local = self._kept[name] if is_kept else local_part(value)
            value = with_local_part(value, local, self.ranks.device)
        return gather_tensor(value.detach().to(dtype), keep=keep)

    def _add_adapters(self, value: Tensor, name: str, layer: Any, kept: bool, keep: bool) -> Tensor:
        """A layer's weight with what its adapters add."""
        first, second = (
            self._gather(part[lora.ADAPTER].weight, f"{name}.{kind}.{lora.ADAPTER}.weight", kept, keep=True)
            for kind, part in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
        )
        if not keep:
            return value
        product = second @ first
        delta: Tensor = (product.T if layer.fan_in_fan_out else product) * layer.scaling[lora.ADAPTER]
        return value + delta

    def save_shards(self, folder: Path) -> Future[Digests]:
        """Starts to write this rank's part of weights and optimizer into a folder that all ranks see."""
        return begin_writing(self.trained_parts, folder, self.ranks)

    def load_shards(self, folder: Path) -> None:
        self.ranks.report("reading a checkpoint", DISK_TIMEOUT_S)
        super().load_shards(folder)

    def write_model_settings(self, folder: Path) -> None:
        """Writes what a checkpoint has besides tensors; on rank 0."""
        model: Any = self.model
        if self.settings.lora:
            lora.save_adapter_settings(model, folder, str(self._source))
        else:
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        write_policy_file(folder, self.steps, self.trained_parts)

    def read_state(self, folder: Path) -> tuple[Mapping[str, Tensor], State]:
        """Reads a checkpoint of one process; on rank 0. Errors name the file."""
        weights = folder / lora.ADAPTER_FILE if self.settings.lora else folder / "model.safetensors"
        with loading_checkpoint(weights):
            if self.settings.lora:
                tensors = {name.removeprefix(lora.NAME_PREFIX): value for name, value in load_file(weights).items()}
                model_state: Mapping[str, Tensor] = {_adapter_name(name): value for name, value in tensors.items()}
            else:
                model_state = load_model(folder).state_dict()
            expected = {name for name in self.model.state_dict() if not self.settings.lora or lora.MARK in name}
            if missing := sorted(expected ^ model_state.keys()):
                raise ValueError(f"{missing[0]} is not in both the model and the file")
        with loading_checkpoint(folder / STATE_FILE):
            state: State = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu")
            if "optimizer" not in state or (self.critic and "critic" not in state):
                raise ValueError("it has no state of the optimizer, or of the critic")
        return model_state, state

    def scatter_state(self, weights: Mapping[str, Tensor], state: State) -> None:
        """Gives each rank its part of what rank 0 read; the others pass nothing but `steps`."""
        scatter_model(self.model, weights, self.ranks)
        scatter_optimizer(self._optimizer, state.get("optimizer", {}), self.ranks)
        if isinstance(self.critic, ShardedCritic):
            self.critic.scatter_state(state.get("critic", {}))
        self.steps = state["steps"]

    def _build_model(self, prepare: Callable[[PreTrainedModel], object], folder: Path | None = None) -> PreTrainedModel:
        return build_sharded_model(folder or self._source, self.ranks, self._dtype, prepare)

    def _make_critic(self, settings: CriticSettings, dtype: torch.dtype) -> Critic:
        def freeze_head(model: PreTrainedModel) -> None:
            model.requires_grad_(False)
            model.base_model.requires_grad_(True)

        body = self._build_model(freeze_head)
        return ShardedCritic(body, settings, self.settings, dtype, self.image_processor, ranks=self.ranks)

    def _select_trained_weights(self) -> None:
        """Was done before the weights were split."""


class ShardedCritic(Critic):
    """A critic of which each rank has a part; its head is whole on each."""

    def __init__(self, *arguments: Any, ranks: ProcessGroupRanks) -> None:
        self._ranks = ranks
        super().__init__(*arguments)

    def _make_head(self, width: int, device: torch.device) -> Tensor:
        return nn.Parameter(replicate(super()._make_head(width, device).detach(), self._ranks))

    @property
    def _head_D(self) -> Tensor:
        head: Any = self._head
        local: Tensor = head.to_local()
        return local

    def step(self) -> None:
        gradient: Any = self._head.grad
        for dimension in range(self._ranks.data_mesh.ndim):
            dist.all_reduce(gradient.to_local(), group=self._ranks.data_mesh.get_group(dimension))
        super().step()

    def scatter_state(self, state: State) -> None:
        """Gives each rank its part; the others pass nothing."""
        scatter_model(self._body, state.get("body", {}), self._ranks)
        scatter_model({"head": self._head}, {"head": state["head"]} if state else {}, self._ranks)
        scatter_optimizer(self._optimizer, state.get("optimizer", {}), self._ranks)


def _base_name(name: str) -> str:
    """The name in the model of the weight of a layer with adapters."""
    layer, _, part = name.rpartition(".")
    return f"{layer}{BASE}{part}"


def _adapter_name(name: str) -> str:
    """An adapter's name in the model, from that in its file."""
    layer, _, part = name.rpartition(".")
    return f"{layer}.{lora.ADAPTER}.{part}"
