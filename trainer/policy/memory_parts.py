"""Memory that a process needs: the parts of a plan, from a model without weights, and what is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from transformers import CONFIG_MAPPING

from trainer.policy.settings import PolicyError, UpdateSettings
from trainer.pretrained import make_model, read_json
from trainer.vision.family import family_from_config

ADAPTABLE = (torch.nn.Linear, torch.nn.Embedding)


def find_adapted_layers(model: Any, update: UpdateSettings) -> list[Any]:
    """The layers that get adapters: those of `update.lora.target_modules`, by default all linear ones but the head, or
    those of attention in a model of experts.

    A vision encoder that is not trained gets none.
    """
    if update.lora is None:
        return []
    family = family_from_config(model.config.to_dict())
    frozen = f"{family.vision_module}." if family and not update.trains_vision else ""
    targets = update.lora.target_modules or find_targets_beside_experts(model)
    layers = []
    for name, layer in model.named_modules():
        if frozen and name.startswith(frozen):
            continue
        if targets:
            is_adapted = any(_is_target(name, target) for target in targets)
        else:
            is_adapted = isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings()
        if is_adapted and isinstance(layer, ADAPTABLE):
            layers.append(layer)
    return layers


def find_unknown_targets(model: Any, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names in `update.lora.target_modules` that fit no layer, and the last parts of those that would."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, ADAPTABLE)]
    unknown = [target for target in targets if not any(_is_target(name, target) for name in names)]
    return unknown, list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _is_target(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def find_targets_beside_experts(model: Any) -> list[str]:
    """Names of the linear layers but the head, without those of parts, such as `mlp`, that have experts in some layer;
    none for a model without experts, all of whose layers can get adapters."""
    parts = [(_LAYER_PART.match(name), name, module) for name, module in model.named_modules()]
    with_experts = {part[1] for part, _, module in parts if part and is_expert_stack(module)}
    head = model.get_output_embeddings()
    linear = [each for each in parts if isinstance(each[2], torch.nn.Linear) and each[2] is not head]
    kept = {name.rpartition(".")[2] for part, name, _ in linear if part is None or part[1] not in with_experts}
    return sorted(kept) if with_experts else []


_LAYER_PART = re.compile(r".*\blayers\.\d+\.(\w+)\.")


def is_expert_stack(module: Any) -> bool:
    """Whether a module has all experts of a layer, each as a row of its weights, as transformers stacks them."""
    return hasattr(module, "_is_expert_parallel")


def count_adapter_parameters(model: Any, update: UpdateSettings) -> int:
    """How many parameters the adapters have: two matrices for each layer."""
    sides: int = sum(sum(layer.weight.shape) for layer in find_adapted_layers(model, update))
    return sides * update.lora.rank if update.lora else 0


TRIED = "Qwen2, Qwen3 and Llama are tried most"


def load_meta_model(folder: Path) -> Any:
    """The model of a folder; raises PolicyError if there is none."""
    has_config = (folder / "config.json").exists()
    if folder.suffix == ".gguf" or (not has_config and any(folder.glob("*.gguf"))):
        remedy = "name the folder of the model that it was made from, with config.json and *.safetensors"
        raise PolicyError(f"{folder} has weights in GGUF, which are for inference and cannot be trained", remedy)
    if not folder.is_dir():
        problem = f"{folder} is a file, not a model's folder" if folder.is_file() else f"there is no folder {folder}"
        remedy = "name a model's folder, or one of the hub as `org/name`"
        raise PolicyError(problem, remedy)
    if not has_config and (folder / "adapter_config.json").exists():
        remedy = (
            f"name the folder of their model{_name_base(folder)}, and `update.lora` to train new ones; or write both"
        )
        remedy += (
            " as one model: `mtrl-train export RUN --out FOLDER`, or peft's `merge_and_unload` and `save_pretrained`"
        )
        raise PolicyError(f"{folder} has only adapters (peft), not the model that they belong to", remedy)
    try:
        with torch.device("meta"):
            return make_model(folder)
    except (OSError, ValueError, KeyError) as error:
        kind = read_json(folder / "config.json").get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING:
            release = f"transformers {transformers.__version__}"
            remedy = "upgrade it (`pip install -U transformers`), or name a model of a family that it knows: " + TRIED
            raise PolicyError(
                f"{folder} has a model of type {kind!r}, which {release} does not know", remedy
            ) from error
        raise PolicyError(f"{folder} has no causal language model: {error}", "name a model's folder") from error


def _name_base(folder: Path) -> str:
    """The model that adapters say they were trained on."""
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    return f" ({base:.100})" if isinstance(base, str) and base else ""


GIB = 1024**3
SMALLER_MODEL = "use a smaller model"
Phase = Literal["loading", "generating", "pass", "end of a pass", "optimizer step", "publishing"]
"""What a run does, one after the other; in modes that generate during updates, parts of generating are in all."""
PHASES: tuple[Phase, ...] = get_args(Phase)
LOADED: tuple[Phase, ...] = ("generating", "pass", "end of a pass", "optimizer step", "publishing")
"""All but loading."""
UPDATE: tuple[Phase, ...] = ("pass", "end of a pass", "optimizer step")


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory, with the setting that lowers it."""

    name: str
    size: int
    """Bytes."""
    remedy: str = SMALLER_MODEL
    """What makes it smaller; empty if it shrinks with another part."""
    during: tuple[Phase, ...] = PHASES
    """The phases in which it is in memory."""
    note: str = ""
    """What cannot be known in advance: shown, but not counted."""

    @property
    def is_transient(self) -> bool:
        """Whether it exists only while weights are updated or published, not while rollouts are generated."""
        return "generating" not in self.during

    def __str__(self) -> str:
        return f"{self.name} {self.size / GIB:.2f} GiB{self.note}"


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory at its peak."""

    parts: tuple[MemoryPart, ...]
    available: int
    taken: int = 0
    """What the process has taken already, with its libraries."""

    @property
    def peak_phase(self) -> Phase:
        """The phase that needs the most."""
        return max(PHASES, key=self.needed_during)

    def needed_during(self, phase: Phase) -> int:
        """The bytes of all parts that are in memory in a phase."""
        return sum(part.size for part in self.parts if phase in part.during)

    @property
    def needed(self) -> int:
        """What is needed at once, in the phase that needs the most."""
        return self.needed_during(self.peak_phase)

    @property
    def peak(self) -> int:
        """The process's memory at its peak."""
        return self.taken + self.needed

    @property
    def fits(self) -> bool:
        return self.needed < self.available

    @property
    def remedy(self) -> str:
        """How to lower the largest parts, the largest first; empty if the plan fits."""
        peak = self.peak_phase
        return "" if self.fits else join_remedies([part for part in self.parts if peak in part.during])

    @property
    def summary(self) -> str:
        most = f"at most {self.needed / GIB:.2f} GiB at once ({self.peak_phase})"
        return f"{most}, of {self.available / GIB:.2f} GiB that are free"

    def __str__(self) -> str:
        return f"memory: {', '.join(map(str, self.parts))}; {self.summary}"


def join_remedies(parts: Sequence[MemoryPart]) -> str:
    """How to lower the parts that are a tenth of all or more, the largest first; parts that follow others have none."""
    total = sum(part.size for part in parts)
    largest = sorted(parts, key=lambda part: -part.size)
    return "; ".join(f"{part.remedy} ({part})" for part in largest if part.remedy and part.size * 10 > total)
