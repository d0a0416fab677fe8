"""Expert parallelism: shards a layer's experts over ranks, and computes each for the tokens of all of them."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from trainer.policy.context_parallel import exchange
from trainer.policy.memory_parts import is_expert_stack
from trainer.policy.settings import PolicyError

EXPERT_REMEDY = "leave `distributed.expert_parallel` out: more `distributed.ranks` split experts too"


def find_experts(model: PreTrainedModel, ranks: int) -> list[Any]:
    """The modules that stack a layer's experts. Raises PolicyError if they cannot be divided among so many ranks."""
    modules: list[Any] = [module for module in model.modules() if is_expert_stack(module)]
    problem = ""
    for module in modules:
        if module.num_experts % ranks:
            problem = f"{ranks} ranks do not divide the model's {module.num_experts} experts"
        elif any(len(value) != module.num_experts for value in module.parameters(recurse=False)):
            problem = f"the experts of {model.config.model_type} models share weights"
    if problem:
        raise PolicyError(f"`distributed.expert_parallel`: {problem}", EXPERT_REMEDY)
    return modules


def keep_experts(model: PreTrainedModel, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Has each rank of the mesh compute its own experts of a model on the meta device; returns their weights."""
    kept = set()
    for module in find_experts(model, mesh.size()):
        for name, value in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(value.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=value.requires_grad))
            kept.add(module.get_parameter(name))
        module.forward = _OwnExperts(module, mesh)
    return kept


class _OwnExperts:
    """The forward pass of a layer's experts: tokens go to the ranks that have theirs, and results come back."""

    def __init__(self, module: Any, mesh: DeviceMesh) -> None:
        self._module, self._group, self._ranks = module, mesh.get_group(), mesh.size()
        self._own = copy(module)
        self._own.num_experts = self._count = module.num_experts // mesh.size()

    def __call__(self, states_UD: Tensor, experts_UC: Tensor, weights_UC: Tensor) -> Tensor:
        order_S = experts_UC.flatten().argsort(stable=True)
        expert_S = experts_UC.flatten()[order_S]
        sent_R = torch.bincount(expert_S // self._count, minlength=self._ranks)
        received_R = torch.empty_like(sent_R)
        dist.all_to_all_single(received_R, sent_R, group=self._group)
        sizes = sent_R.tolist(), received_R.tolist()
        states_SD = exchange(states_UD[order_S // experts_UC.shape[1]], self._group, *sizes)
        results_SD = self._compute(states_SD, exchange(expert_S % self._count, self._group, *sizes))
        results_SD = exchange(results_SD, self._group, *reversed(sizes))[order_S.argsort()]
        result_UD = (results_SD.view(*experts_UC.shape, -1) * weights_UC[..., None]).sum(1)
        return result_UD.to(states_UD.dtype)

    def _compute(self, states_SD: Tensor, expert_S: Tensor) -> Tensor:
        """Each token's result from one of this rank's experts."""
        if not len(expert_S):  # The other ranks wait for its gradient, too.
            return states_SD
        parts: Any = self._module.named_parameters(recurse=False)
        self._own._parameters = {name: value.to_local().to(states_SD.dtype) for name, value in parts}
        result: Tensor = self._own(states_SD, expert_S[:, None], torch.ones_like(states_SD[:, :1]))
        self._own._parameters = {}  # A pass keeps what its gradient needs.
        return result
