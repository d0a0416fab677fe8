"""The critic (value model) for GAE: predicts the return before each token, and learns from the actual returns."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from trainer.algorithms.packing import Batch, token_positions
from trainer.model import device_of
from trainer.policy.logprobs import LogprobReader, PassPlan
from trainer.policy.master_weights import MasterWeights
from trainer.policy.optimizers import clip_gradients, fill_gradients
from trainer.policy.settings import CriticSettings, PolicyError, UpdateSettings
from trainer.policy.shards import TrainedPart, saved_tensors
from trainer.vision.image_processor import ImageProcessor


class Critic:
    """A copy of the policy's initial model, with a scalar head that starts at 0."""

    def __init__(
        self,
        body: PreTrainedModel,
        settings: CriticSettings,
        update: UpdateSettings,
        dtype: torch.dtype,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        """Trains `body`, a copy of the policy's model."""
        body.requires_grad_(False)
        body.base_model.requires_grad_(True)
        self._masters = MasterWeights(body.base_model, dtype)
        MasterWeights(body, dtype)  # Rounds the head of the language model, which is not trained.
        self._reader = LogprobReader(body, update.logits_chunk, dtype, image_processor)
        width: int = body.config.get_text_config(decoder=True).hidden_size
        self._head = self._make_head(width, device_of(body))
        self._parameters = [*self._masters.named(body.base_model.named_parameters()).values(), self._head]
        self._body, self._clip = body.base_model, update.max_grad_norm
        lr = update.critic_rate if settings.lr is None else settings.lr
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, betas=update.betas, weight_decay=0.0, fused=True)

    def _make_head(self, width: int, device: torch.device) -> Tensor:
        return torch.zeros(width, device=device, requires_grad=True)

    @property
    def _head_D(self) -> Tensor:
        return self._head

    def compute_values(self, batch: Batch, plan: PassPlan | None = None) -> Tensor:
        """Predicts the return before each token; 0 for the first token of a sequence."""
        hidden = self._reader.compute_hidden_states(batch.ids_T, batch.sequence_T, batch.images, plan)
        previous_T = hidden.node_T.roll(1)
        values_U = self._reader.gather_nodes(hidden.states_UD.float() @ self._head_D)
        values_T = embedding(previous_T, values_U[:, None])[:, 0]
        return torch.where(token_positions(batch.sequence_T) > 0, values_T, 0)

    def accumulate_gradient(self, batch: Batch, returns_T: Tensor, tokens: int, plan: PassPlan | None = None) -> Tensor:
        """Adds a micro-batch's gradient of the mean squared error over `tokens` tokens; returns its loss."""
        values_T = self.compute_values(batch, plan)
        error_T = torch.where(batch.mask_T, values_T - returns_T, 0)
        loss = (error_T**2).sum() / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> None:
        norm = float(clip_gradients(self._parameters, self._clip))
        if not isfinite(norm):
            raise PolicyError(f"the critic's gradient is not finite ({norm})", "lower `update.critic.lr`")
        fill_gradients(self._optimizer)
        self._optimizer.step()
        self.round()
        self.zero_grad()

    def round(self) -> None:
        """Gives the model what its master weights have become."""
        self._masters.round()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def trained_part(self) -> TrainedPart:
        """What several ranks save of it."""
        tensors = self._masters.named(saved_tensors(self._body).items())
        return TrainedPart("critic", {**tensors, "head": self._head}, self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        body = self._masters.state_dict
        return {"body": body, "head": self._head.detach(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._body.load_state_dict(state["body"])
        self._masters.load(state["body"])
        self._head.data.copy_(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
