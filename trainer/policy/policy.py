"""The model that learns: the logprobs of what was written, a step on their loss, its weights for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from gateway.config.models import Frozen

STATE = "optimizer.pt"


class UpdateSettings(Frozen):
    """How the weights are moved."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` moves matrices by Muon and everything else by AdamW."""
    lr: PositiveFloat = 1e-3
    """Learning rate of AdamW."""
    muon_lr: PositiveFloat = 0.02
    """Learning rate of Muon."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of either optimizer."""
    warmup: NonNegativeInt = 0
    """Steps on which the rate rises to its full height."""
    steps: PositiveInt | None = None
    """Steps on which it then falls in a line to `floor`; without it, the rate stays."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where it falls to, as a share of the full rate."""
    clip: PositiveFloat = 1.0
    """The gradient's norm at the most."""
    chunk: PositiveInt = 1024
    """Tokens whose logits exist at one time: a large vocabulary needs no more memory than this."""


class PolicyError(Exception):
    """A step that cannot be made; the weights are as they were."""


class Policy:
    """A causal language model with its optimizers. Token axes are packed: sequences one after the other, no padding."""

    def __init__(self, model: PreTrainedModel, settings: UpdateSettings) -> None:
        self.model, self.settings = model, settings
        self.steps = 0
        """Made so far; the version of the weights."""
        self._optimizers = _optimizers(model, settings)
        self._rates = [[group["lr"] for group in one.param_groups] for one in self._optimizers]

    def logprobs(self, ids_T: Tensor, sequence_T: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Of each token given those before it in its sequence; 0 for the first of each, which nobody wrote."""
        hidden_TD = self._hidden(ids_T, sequence_T)
        parts = [
            checkpoint(
                self._picked, hidden_TD[start:stop], ids_T[start + 1 : stop + 1], temperature, use_reentrant=False
            )
            for start, stop in _chunks(len(ids_T) - 1, self.settings.chunk)
        ]
        logprobs_T = torch.cat([hidden_TD.new_zeros(1, dtype=torch.float32), *parts])
        return torch.where(_first(sequence_T), 0.0, logprobs_T)

    def _hidden(self, ids_T: Tensor, sequence_T: Tensor) -> Tensor:
        """What the model holds of each token; a sequence sees itself alone, and its places count from 0."""
        same_TT = sequence_T[:, None] == sequence_T[None, :]
        seen_TT = same_TT & torch.ones_like(same_TT).tril()
        base = self.model.base_model
        out = base(
            input_ids=ids_T[None],
            position_ids=places(sequence_T)[None],
            attention_mask=seen_TT[None, None],
            use_cache=False,
        )
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD

    def _picked(self, hidden_CD: Tensor, ids_C: Tensor, temperature: float) -> Tensor:
        head: torch.nn.Module = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        logits_CV = head(hidden_CD).float() / temperature
        picked_C: Tensor = logits_CV.log_softmax(-1).gather(-1, ids_C[:, None])[:, 0]
        return picked_C

    def step(self) -> dict[str, float]:
        """Moves the weights by the gradient that was gathered; one that is not finite moves nothing, and says so."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        if not torch.isfinite(norm):
            self.forget()
            raise PolicyError(
                f"the gradient of step {self.steps + 1} is not finite ({float(norm)}); nothing was moved. "
                "Lower `lr`, or look for rewards or logprobs that are no numbers"
            )
        share = self.share(self.steps)
        for optimizer, rates in zip(self._optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
            optimizer.step()
        self.forget()
        self.steps += 1
        return {"update/grad_norm": float(norm), "update/lr": self.settings.lr * share}

    def forget(self) -> None:
        """Lets go of what was gathered."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def share(self, step: int) -> float:
        """Of the full rate, at a step."""
        settings = self.settings
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        if settings.steps is None:
            return 1.0
        gone = min(1.0, (step - settings.warmup) / max(1, settings.steps - settings.warmup))
        return 1.0 - (1.0 - settings.floor) * gone

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """For the engine's `publish`."""
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def save(self, folder: Path) -> None:
        """A folder that `from_pretrained` loads, with what a later start needs beside it."""
        self.model.save_pretrained(folder)
        state = {"steps": self.steps, "optimizers": [one.state_dict() for one in self._optimizers]}
        torch.save(state, folder / STATE)

    def resume(self, folder: Path) -> None:
        """Goes on from a folder that `save` made, whose weights the model was loaded from."""
        state: dict[str, Any] = torch.load(folder / STATE, weights_only=True)
        self.steps = state["steps"]
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def places(sequence_T: Tensor) -> Tensor:
    """Each token's place in its own sequence, from 0."""
    count_T = torch.arange(len(sequence_T), device=sequence_T.device)
    begun_T = torch.where(_first(sequence_T), count_T, 0).cummax(0).values
    return count_T - begun_T


def _first(sequence_T: Tensor) -> Tensor:
    before_T = torch.cat([sequence_T[:1] - 1, sequence_T[:-1]])
    return sequence_T != before_T


def _chunks(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _optimizers(model: PreTrainedModel, settings: UpdateSettings) -> list[torch.optim.Optimizer]:
    learned = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    matrices = [value for name, value in learned if settings.optimizer == "muon" and _is_matrix(name, value)]
    known = {id(value) for value in matrices}
    others = [value for _, value in learned if id(value) not in known]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, momentum=0.95))
    if others:
        made.append(torch.optim.AdamW(others, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay))
    return made


def _is_matrix(name: str, value: Tensor) -> bool:
    """Embeddings and the head are tables, not maps; Muon is for maps."""
    return value.ndim == 2 and "embed" not in name and "lm_head" not in name
