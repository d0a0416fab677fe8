"""What a run needs is counted on the shapes alone, before anything of the model's size is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from trainer.config import PlaySettings
from trainer.learn.settings import AlgorithmSettings
from trainer.model import kind_of
from trainer.policy.errors import PolicyError
from trainer.policy.optimizers import is_map
from trainer.policy.settings import UpdateSettings
from trainer.vision.family import family_of

GIB = 1024**3
FLOAT = 4
SMALLER = "take a smaller model"
ROWS = "lower `admission.writing` or `limits.rollout_tokens`"
LORA = "set `update.lora`"
CHUNK = "lower `update.chunk`"


@dataclass(frozen=True, slots=True)
class Part:
    what: str
    size: int
    """Bytes."""
    knob: str = SMALLER
    """What makes it smaller."""
    passing: bool = False
    """There only while a step learns."""
    more: str = ""
    """What nobody can know before: told, and not counted."""

    def __str__(self) -> str:
        return f"{self.what} {self.size / GIB:.2f} GiB{self.more}"


@dataclass(frozen=True)
class Plan:
    """Of a run's memory, at its fullest."""

    parts: tuple[Part, ...]
    room: int

    @property
    def needed(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.needed < self.room

    @property
    def remedy(self) -> str:
        """The largest first."""
        return "" if self.fits else _remedy(self.parts)

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.parts))
        return f"memory: {parts}; together {self.needed / GIB:.2f} GiB of {self.room / GIB:.2f} GiB that are free"

    def require(self) -> None:
        if not self.fits:
            raise PolicyError(f"this run does not fit: {self}", self.remedy)


def plan(settings: PlaySettings, folder: Path, room: int | None = None) -> Plan:
    """Of rollouts, and of learning from them where the settings say how."""
    model = shapes(folder)
    update: UpdateSettings | None = getattr(settings, "update", None)
    algorithm: AlgorithmSettings | None = getattr(settings, "algorithm", None)
    writing, tokens = settings.admission.writing, settings.limits.rollout_tokens
    parts = [
        Part("weights of the engine", _weights(model)),
        Part("keys and values", writing * tokens * _kept(model), ROWS),
    ]
    if update and algorithm:
        parts += _learning(model, update, algorithm)
        parts += moving(model, update, max(update.tokens, tokens))
    return Plan(tuple(parts), free() if room is None else room)


def shapes(folder: Path) -> Any:
    """The model without its numbers."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return kind_of(folder).from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise PolicyError(f"{folder} holds no causal language model: {error}", "give a model's folder") from error


def moving(model: Any, update: UpdateSettings, tokens: int) -> list[Part]:
    """What is there only while a gradient is gathered."""
    config = model.config.get_text_config(decoder=True)
    heads, keys, width = _heads(config)
    hidden, inner = config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size)
    # Of each layer: what its norms, products and activations keep for the way back, counted on the common ones.
    layer = 10 * hidden + 6 * (heads + keys) * width + 4 * inner
    layers = config.num_hidden_layers
    kept = layer + layers * hidden if update.checkpointing else layers * layer
    knob = "lower `update.tokens`" + ("" if update.checkpointing else " or set `update.checkpointing`")
    seen, more = looking(model, update), ""
    if seen:
        knob += " or `update.vision: frozen`"
        more = f" (and of these, for each that stands for a picture, {seen / 2**20:.2g} MiB in the eyes)"
    whole = f"{knob}; a single rollout is never cut"
    return [
        Part(f"a pass over {tokens} tokens", FLOAT * tokens * kept, whole, True, more),
        Part(f"logits of {update.chunk} tokens", 4 * FLOAT * update.chunk * config.vocab_size, CHUNK, True),
    ]


def looking(model: Any, update: UpdateSettings) -> int:
    """Bytes that eyes which learn keep for each id of a picture: what goes into their maps and comes out of them."""
    family = family_of(model.config.to_dict())
    if family is None or not update.looks:
        return 0
    eyes, told = model.get_submodule(family.eyes), model.config.vision_config
    maps = [(one.in_features, one.out_features) for one in eyes.modules() if isinstance(one, torch.nn.Linear)]
    kept = sum(map(sum, maps))
    if update.checkpointing:
        kept = kept // told.depth + told.depth * maps[0][0]
    return FLOAT * int(told.spatial_merge_size) ** 2 * kept


def _learning(model: Any, update: UpdateSettings, algorithm: AlgorithmSettings) -> Iterator[Part]:
    whole = _weights(model)
    yield Part("weights", whole)
    if update.lora:
        linear = [one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and name != "lm_head"]
        sides = sum(one.in_features + one.out_features for one in linear)
        yield Part("adapters", 4 * FLOAT * update.lora.rank * sides, "lower `update.lora.rank`")
        yield Part("merged weights for the engine", whole, passing=True)
    else:
        yield Part("gradients", whole, LORA, True)
        yield Part("optimizer", FLOAT * _moments(model, update), LORA)
        if algorithm.kl.coefficient:
            yield Part("reference", whole, f"{LORA}, or `algorithm.kl.coefficient: 0`")
    if update.critic:
        yield Part("critic", 4 * whole, "credit by something else than `gae`, without `update.critic`")


def _moments(model: Any, update: UpdateSettings) -> int:
    """Muon remembers one number of a weight, AdamW two."""
    muon = update.optimizer == "muon"
    return sum((1 if muon and is_map(name, one) else 2) * one.numel() for name, one in model.named_parameters())


def _weights(model: Any) -> int:
    numbers: int = sum(parameter.numel() for parameter in model.parameters())
    return FLOAT * numbers


def _kept(model: Any) -> int:
    """Bytes of a token's keys and values."""
    config = model.config.get_text_config(decoder=True)
    _, keys, width = _heads(config)
    size: int = 2 * FLOAT * config.num_hidden_layers * keys * width
    return size


def _heads(config: Any) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    return heads, keys, getattr(config, "head_dim", None) or config.hidden_size // heads


def free() -> int:
    """Bytes that may be taken: of the GPU where there is one, else of the machine, what it can clear included."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def ran_out(error: BaseException) -> bool:
    """On a GPU it has a kind of its own; on a CPU only its text tells."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def remedy(model: Any, update: UpdateSettings) -> str:
    """For a step that ran out of it."""
    return _remedy(moving(model, update, update.tokens))


def _remedy(parts: Any) -> str:
    largest = sorted(parts, key=lambda part: -part.size)
    total = sum(part.size for part in parts)
    named = [f"{part.knob} ({part})" for part in largest if part.size * 10 > total]
    return "; ".join(named)
