"""A critic says what to expect of a rollout before each of its tokens is written; it learns from what then came."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from gateway.types import Image
from trainer.learn.batch import Batch
from trainer.policy.errors import PolicyError
from trainer.policy.forest import places
from trainer.policy.reader import Reader
from trainer.policy.settings import CriticSettings, UpdateSettings
from trainer.vision.eyes import Eyes


class Critic:
    """The policy's own body as it was in the beginning, with a head of one number, which is 0 at first."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: CriticSettings,
        update: UpdateSettings,
        dtype: torch.dtype,
        eyes: Eyes | None = None,
    ) -> None:
        body = copy.deepcopy(model)
        self._reader = Reader(body, update.chunk, dtype, eyes)
        width: int = body.config.get_text_config(decoder=True).hidden_size
        self._head = torch.zeros(width, device=model.device, requires_grad=True)
        self._learned = [*body.base_model.parameters(), self._head]
        self._body, self._clip = body.base_model, update.clip
        self._optimizer = torch.optim.AdamW(self._learned, lr=settings.lr, betas=update.betas, weight_decay=0.0)

    def values(self, ids_T: Tensor, sequence_T: Tensor, images: Sequence[Image] = ()) -> Tensor:
        """Of each token, what was to be expected before it was written; 0 for the first of a row."""
        hidden = self._reader.hidden(ids_T, sequence_T, images)
        before_T = hidden.at_T.roll(1)
        values_T = embedding(before_T, hidden.values_UD).float() @ self._head
        return torch.where(places(sequence_T) > 0, values_T, 0)

    def gather(self, batch: Batch, returns_T: Tensor, tokens: int) -> float:
        """Of squared errors over what the policy wrote, a micro-batch's part of the mean."""
        values_T = self.values(batch.ids_T, batch.sequence_T, batch.images)
        error_T = torch.where(batch.mask_T, values_T - returns_T, 0)
        loss = (error_T**2).sum() / tokens
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def step(self) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self._learned, self._clip)
        if not torch.isfinite(norm):
            raise PolicyError(f"the critic's gradient is not finite ({float(norm)})", "lower `update.critic.lr`")
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def state(self) -> dict[str, Any]:
        body = self._body.state_dict()
        return {"body": body, "head": self._head.detach(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self._body.load_state_dict(state["body"])
        self._head.data.copy_(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
