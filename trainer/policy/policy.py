"""The model that learns: how likely it finds what was written, a step on its gradient, its weights for the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gateway.types import Image
from trainer.model import load_model
from trainer.policy import lora
from trainer.policy.critic import Critic
from trainer.policy.errors import PolicyError
from trainer.policy.filed import filed
from trainer.policy.optimizers import optimizers, share
from trainer.policy.reader import Read, Reader, Reads
from trainer.policy.settings import UpdateSettings
from trainer.vision.eyes import Eyes

STATE = "optimizer.pt"
WHOLE = "go on from a checkpoint that is whole, with the model and the `update` settings that it was made with"


class Policy:
    """A causal language model with its optimizers."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: UpdateSettings,
        folder: Path | None = None,
        eyes: Eyes | None = None,
    ) -> None:
        self.model, self.settings, self.folder, self.eyes = model, settings, folder, eyes
        """`folder` is where the weights came from: what a reference is read from again."""
        self.steps = 0
        """Made so far."""
        dtype = _dtype(settings, model.device)
        self.critic = Critic(model, settings.critic, settings, dtype, eyes) if settings.critic else None
        self.reader = Reader(model, settings.chunk, dtype, eyes)
        frozen = eyes.family.eyes if eyes and not settings.looks else ""
        if settings.lora:
            lora.adapt(model, settings.lora, frozen)
        elif frozen:
            model.get_submodule(frozen).requires_grad_(False)
        _remember(model, settings.checkpointing)
        self._optimizers = optimizers(model.named_parameters(), settings)
        self._rates = [[group["lr"] for group in one.param_groups] for one in self._optimizers]

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: UpdateSettings,
        device: torch.device | str | None = None,
        eyes: Eyes | None = None,
    ) -> Self:
        """From a model's folder, on the GPU where there is one. With `eyes` that others look through as well, a picture
        is made ready once for all of them."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(load_model(folder, device=device), settings, folder, eyes or Eyes.load(folder))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def read(
        self, ids_T: Tensor, sequence_T: Tensor, among_T: Tensor, temperature: float = 1.0, images: Sequence[Image] = ()
    ) -> Read:
        """Of the tokens `among_T` of rows that lie end to end, given those before each in its row."""
        return self.reader.read(ids_T, sequence_T, among_T, temperature, images)

    def finds(self, ids: Sequence[int], images: Sequence[Image] = ()) -> list[float]:
        """Of each id but the first, given those before it."""
        return self.reader.finds(ids, images)

    def reference(self) -> Reads:
        """The policy as it was in the beginning: without adapters, or from its folder once more."""
        if self.settings.lora:
            return Bare(self)
        if self.folder is None:
            raise PolicyError("a reference needs a folder, and this policy came from none", "give the reference itself")
        model = load_model(self.folder, device=self.device).requires_grad_(False)
        return Reader(model, self.settings.chunk, self.reader.dtype, self.eyes)

    def step(self) -> dict[str, float]:
        """Moves the weights by the gradient that was gathered; one that is not finite moves nothing, and says so."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        if not torch.isfinite(norm):
            self.forget()
            problem = f"the gradient of step {self.steps + 1} is not finite ({float(norm)}); nothing was moved"
            raise PolicyError(problem, "lower `update.lr`, or look for rewards or logprobs that are no numbers")
        part = share(self.steps, self.settings)
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * part
            optimizer.step()
        self.forget()
        self.steps += 1
        return {"update/grad_norm": float(norm), "update/lr": self.settings.lr * part}

    def forget(self) -> None:
        """Lets go of what was gathered."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def shrink(self) -> None:
        """Gives back what the GPU holds for tensors that are gone."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """For the engine's `publish`: adapters merged, by the model's own names."""
        if self.settings.lora:
            return lora.merged(self.model)
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def filed(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """For servers, which read them as they read the model's folder."""
        return filed(self.model, weights)

    def save(self, folder: Path) -> None:
        """A folder that `from_pretrained` loads, of adapters alone where those are learned, and what `resume` needs."""
        self.model.save_pretrained(folder)
        state = {"steps": self.steps, "optimizers": [one.state_dict() for one in self._optimizers]}
        torch.save(state | ({"critic": self.critic.state} if self.critic else {}), folder / STATE)

    def resume(self, folder: Path) -> None:
        """Goes on from a folder that `save` made, to the bit. Where it cannot, the error names the file."""
        weights = folder / lora.FILE if self.settings.lora else folder / "model.safetensors"
        with _reading(weights):
            if self.settings.lora:
                lora.load(self.model, folder)
            else:
                self.model.load_state_dict(load_model(folder).state_dict())
        with _reading(folder / STATE):
            state: dict[str, Any] = torch.load(folder / STATE, weights_only=True, map_location=self.device)
            for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            if self.critic:
                self.critic.load(state["critic"])
            self.steps = state["steps"]


class Bare:
    """A policy without its adapters."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def read(
        self, ids_T: Tensor, sequence_T: Tensor, among_T: Tensor, temperature: float = 1.0, images: Sequence[Image] = ()
    ) -> Read:
        with lora.bare(self._policy.model):
            return self._policy.read(ids_T, sequence_T, among_T, temperature, images)


def _dtype(settings: UpdateSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32


def _remember(model: PreTrainedModel, checkpointing: bool) -> None:
    """Nothing is dropped at random: what was written was written without, and has to be found as likely again."""
    if checkpointing:
        if not model.supports_gradient_checkpointing:
            raise PolicyError(
                f"a {model.config.model_type} has no gradient checkpointing", "leave `update.checkpointing` off"
            )
        enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    model.train(checkpointing)  # Layers ask for it before they check what they remember.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train(False)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torn files fail in as many ways as there are formats
        what = "is missing" if not file.exists() else f"cannot be taken up ({type(error).__name__}: {error})"
        raise PolicyError(f"{file} {what}", WHOLE) from error
