"""The policy: a causal language model with its optimizer, checkpoints, and weights for the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from gateway.types import Image
from trainer.algorithms.packing import TopLogprobs
from trainer.engine.base import AdapterShape
from trainer.model import SHARDS_FOLDER, device_of, load_model
from trainer.policy import lora
from trainer.policy.head_logprobs import compile_steps
from trainer.policy.logprobs import LogprobReader, Logprobs, PackedTokens, PassPlan, Reference, decoder_layers_of
from trainer.policy.master_weights import MasterWeights, compute_dtype
from trainer.policy.optimizers import (
    LR_RATIO,
    OptimizerMaker,
    build_optimizer,
    choose_rates,
    clip_gradients,
    fill_gradients,
    learning_rate_factor,
)
from trainer.policy.process_memory import trim_heap
from trainer.policy.ranks import ONE_RANK, Ranks
from trainer.policy.settings import Checkpointing, CriticSettings, PolicyError, UpdateSettings
from trainer.policy.shards import MODEL, POLICY_FILE, TrainedPart, has_shards, load_parts, read_steps, saved_tensors
from trainer.pretrained import ModelCodeError
from trainer.vision.image_processor import ImageProcessor

if TYPE_CHECKING:
    from trainer.policy.critic import Critic


def to_checkpoint_tensors(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Renames and reshapes weights as a checkpoint's files have them; in memory, a model may differ.

    Copies, as of experts that are stacked in one tensor, are on the device of the weights. Of tied weights, pass one:
    the order changes.
    """
    with torch.no_grad():
        tensors: Mapping[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return tensors


STATE_FILE = "optimizer.pt"
RESUME_REMEDY = "continue from a complete checkpoint, with the model and the `update` settings that it was written with"


class Policy:
    """A causal language model with its optimizer."""

    ranks: Ranks = ONE_RANK

    def __init__(
        self,
        model: PreTrainedModel,
        settings: UpdateSettings,
        folder: Path | None = None,
        image_processor: ImageProcessor | None = None,
        make_optimizer: OptimizerMaker = build_optimizer,
    ) -> None:
        """`folder` is where the weights came from, and where a reference is loaded from again."""
        settings = choose_rates(settings, sum(value.numel() for value in model.parameters()))
        self.model, self.settings, self.folder, self.image_processor = model, settings, folder, image_processor
        self.steps = 0
        """Optimizer steps made so far."""
        dtype = compute_dtype(settings, self.device)
        self.critic = self._make_critic(settings.critic, dtype) if settings.critic else None
        self._select_trained_weights()
        self._masters = MasterWeights(model, dtype)
        self.logprob_reader = LogprobReader(model, settings.logits_chunk, dtype, image_processor)
        _configure_checkpointing(model, settings.gradient_checkpointing)
        if settings.compile:
            self._compile_layers()
        self._trained = self._masters.named(model.named_parameters())
        self._optimizer = make_optimizer(self._trained, settings)

    def _make_critic(self, settings: CriticSettings, dtype: torch.dtype) -> Critic:
        from trainer.policy.critic import Critic

        return Critic(copy.deepcopy(self.model), settings, self.settings, dtype, self.image_processor)

    def _compile_layers(self) -> None:
        """Compiles decoder layers and what is done with logits, once for all lengths."""
        if self.ranks.size > 1:
            raise PolicyError("`update.compile` works in one process", "leave it off with `--ranks`")
        layers = decoder_layers_of(self.model)
        if not layers:
            kind = self.model.config.model_type
            raise PolicyError(f"{kind} models have no list of decoder layers to compile", "leave `update.compile` off")
        for layer in layers:
            layer.compile(dynamic=True)
        self.logprob_reader.head_steps = compile_steps()

    def _select_trained_weights(self) -> None:
        select_trained_weights(self.model, self.settings, self.image_processor)

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: UpdateSettings,
        device: torch.device | str | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> Self:
        """Loads a model's folder, onto the GPU if there is one. A shared `image_processor` prepares each image once
        for all who use it."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        processor = image_processor or ImageProcessor.load(folder)
        return cls(load_model(folder, device=device), settings, folder, processor)

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    def compute_logprobs(self, ids: Sequence[int], images: Sequence[Image] = ()) -> list[float]:
        """Computes the logprob of each id but the first, for comparison with an engine."""
        return self.logprob_reader.compute_logprobs(ids, images)

    def load_reference(self, teacher: Path | None = None) -> Reference:
        """Another model, or the policy before training: without its adapters, or loaded from its folder again."""
        if self.settings.lora and teacher is None:
            return WithoutAdapters(self)
        folder = teacher or self.folder
        if folder is None:
            raise PolicyError("the policy was not loaded from a folder, so it has no reference", "pass a reference")
        dtype = self.logprob_reader.dtype
        model = load_model(folder, dtype, self.device).requires_grad_(False)
        return LogprobReader(model, self.settings.logits_chunk, dtype, self.image_processor)

    def step(self) -> dict[str, float]:
        """Makes an optimizer step with the accumulated gradient. If that is not finite, raises and changes nothing."""
        norm = float(clip_gradients(self._trained.values(), self.settings.max_grad_norm))
        if not isfinite(norm):
            self.zero_grad()
            problem = f"the gradient of step {self.steps + 1} is not finite ({norm}); no weight was changed"
            raise PolicyError(problem, "lower `update.lr`, or look for rewards or logprobs that are not finite")
        factor = learning_rate_factor(self.steps, self.settings)
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.rate * factor * group.get(LR_RATIO, 1.0)
        fill_gradients(self._optimizer)
        self._optimizer.step()
        change = self._masters.measure_change()
        self._masters.round()
        self.zero_grad()
        trim_heap(self.model)
        self.steps += 1
        return {"update/grad_norm": norm, "update/lr": self.settings.rate * factor} | change

    @property
    def step_state(self) -> dict[str, Any]:
        """Settings of the optimizer, which each kind of checkpoint keeps, and what else changes from step to step."""
        return self._optimizer.param_groups[0]

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def release_cached_memory(self) -> None:
        """Returns the GPU memory that torch caches for freed tensors."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights for the engine's `publish`, as the model computes with them, with adapters merged, under the
        model's own names."""
        if self.settings.lora:
            return lora.LoraWeights(self.model)
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    @property
    def whole_model(self) -> PreTrainedModel | None:
        """The model, if an engine in this process can use its weights as they are; None with adapters."""
        return None if self.settings.lora else self.model

    @property
    def adapter_shape(self) -> AdapterShape | None:
        """What an engine has to know of the adapters; None without any."""
        return lora.adapter_shape(self.model) if self.settings.lora else None

    def checkpoint_tensors(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights in the form that a server reads from the model's folder."""
        return to_checkpoint_tensors(self.model, weights)

    def save(self, folder: Path) -> Callable[[], Mapping[str, str]] | None:
        """Writes a folder that `from_pretrained` loads (only the adapters with LoRA), and what `resume` needs.

        Where files are still being written, it returns a function that waits for them, and returns their digests.
        """
        if self.settings.lora:
            lora.save_adapters(self.model, folder, self._masters.state_dict)
        else:
            self.model.save_pretrained(folder, state_dict=self._masters.state_dict)
        state = {"steps": self.steps, "optimizer": self._optimizer.state_dict()}
        torch.save(state | ({"critic": self.critic.state_dict()} if self.critic else {}), folder / STATE_FILE)
        return None

    @property
    def trained_parts(self) -> list[TrainedPart]:
        """What several ranks save, and what is read of it here."""
        tensors = self._masters.named(saved_tensors(self.model).items())
        if self.settings.lora:
            tensors = {name: value for name, value in tensors.items() if lora.MARK in name}
        parts = [TrainedPart(MODEL, tensors, self._optimizer)]
        return [*parts, self.critic.trained_part] if self.critic else parts

    def load_shards(self, folder: Path) -> None:
        """Restores what several ranks saved; on a rank, its part."""
        with loading_checkpoint(folder / POLICY_FILE):
            self.steps = read_steps(folder, self.trained_parts)
        with loading_checkpoint(folder / SHARDS_FOLDER):
            load_parts(folder, self.trained_parts)
        self._masters.round()
        if self.critic:
            self.critic.round()

    def resume(self, folder: Path) -> None:
        """Restores what `save` wrote, bit for bit, here or on ranks. Errors name the file that cannot be loaded."""
        if has_shards(folder):
            self.load_shards(folder)
            return
        weights = folder / lora.ADAPTER_FILE if self.settings.lora else folder / "model.safetensors"
        with loading_checkpoint(weights):
            if self.settings.lora:
                self._masters.load(lora.load_adapters(self.model, lora.read_adapters(folder)))
            else:
                state = load_model(folder).state_dict()
                self.model.load_state_dict(state)
                self._masters.load(state)
        with loading_checkpoint(folder / STATE_FILE):
            saved: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True, map_location=self.device)
            self._optimizer.load_state_dict(saved["optimizer"])
            if self.critic:
                self.critic.load_state_dict(saved["critic"])
            self.steps = saved["steps"]


class WithoutAdapters:
    """The policy with its adapters disabled: the reference of a LoRA run."""

    def __init__(self, policy: Policy) -> None:
        self._reader = policy.logprob_reader

    def compute_batch_logprobs(self, tokens: PackedTokens, plan: PassPlan | None = None) -> Logprobs:
        with lora.adapters_disabled(self._reader.model):
            return self._reader.compute_batch_logprobs(tokens, plan)

    def compute_top_logprobs(self, tokens: PackedTokens, top: int, plan: PassPlan | None = None) -> TopLogprobs:
        with lora.adapters_disabled(self._reader.model):
            return self._reader.compute_top_logprobs(tokens, top, plan)


def select_trained_weights(
    model: PreTrainedModel, settings: UpdateSettings, image_processor: ImageProcessor | None
) -> None:
    """Adds adapters, or freezes what is not trained."""
    frozen = image_processor.family.vision_module if image_processor and not settings.trains_vision else ""
    if settings.lora:
        lora.add_adapters(model, settings.lora, frozen)
    elif frozen:
        model.get_submodule(frozen).requires_grad_(False)


def _configure_checkpointing(model: PreTrainedModel, checkpointing: Checkpointing) -> None:
    """Dropout stays off: rollouts are sampled without it, and their logprobs have to be reproduced."""
    if checkpointing == "feed_forward":
        layers = decoder_layers_of(model)
        if not layers or not all(hasattr(layer, "mlp") for layer in layers):
            raise PolicyError(
                f"{model.config.model_type} models have no part `mlp` in each decoder layer to compute again",
                "set `update.gradient_checkpointing` to `true` or `false`",
            )
        for layer in layers:
            layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=False, preserve_rng_state=False)
    elif checkpointing:
        if not model.supports_gradient_checkpointing:
            raise PolicyError(
                f"{model.config.model_type} models have no gradient checkpointing",
                "leave `update.gradient_checkpointing` off",
            )
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    model.train(checkpointing is True)  # transformers checkpoints activations in training mode only.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train(False)


@contextmanager
def loading_checkpoint(file: Path) -> Iterator[None]:
    """Turns whatever goes wrong into an error that names the file."""
    try:
        yield
    except ModelCodeError:
        raise
    except Exception as error:  # boundary: each file format fails in its own way
        problem = "is missing" if not file.exists() else f"cannot be loaded ({type(error).__name__}: {error})"
        raise PolicyError(f"{file} {problem}", RESUME_REMEDY) from error
