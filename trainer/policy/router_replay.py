"""Router replay: in training, tokens go to the experts that the engine sent them to when it sampled.

Engine and trainer round differently, so that a router's choice between two close experts may differ, and with it the
token's logprobs by far more than rounding. Only the choice is taken over; how much each expert counts is computed from
the trained router, which therefore has its gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.policy.settings import PolicyError

REMEDY = "start the server without `--enable-return-routed-experts`"
Weigh = Callable[[Tensor, Tensor], Tensor]
LAYER = re.compile(r"\blayers\.(\d+)\.")


class RouterReplay:
    """Has a model's routers choose the experts that the engine chose."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises PolicyError for a model without routers."""
        self.experts_UX: Tensor | None = None
        """Of the present pass; -1 for a token for which the trained router chooses."""
        self._weigh: Weigh | None = None
        config = model.config.get_text_config(decoder=True)
        self._layers, self._kind = config.num_hidden_layers, config.model_type
        routers = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
        if not routers:
            raise PolicyError(f"the engine tells experts, but {self._kind} models have no router that is known", REMEDY)
        for name, router in routers:
            layer = LAYER.search(name)
            router.register_forward_hook(partial(self._replace_choice, int(layer[1]) if layer else 0))

    def _replace_choice(self, layer: int, _: nn.Module, __: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Takes and returns what routers of transformers do: logits, the weights of the chosen experts, the choice."""
        if self.experts_UX is None:
            return output
        if not isinstance(output, tuple) or len(output) != 3 or output[2].is_floating_point():
            raise PolicyError(f"the routers of {self._kind} models have a form that is not known here", REMEDY)
        logits_UE, weights_UC, own_UC = output
        sent, own = self.experts_UX.shape[1], self._layers * own_UC.shape[-1]
        if sent != own:
            problem = f"the engine sends each token to {sent} experts, and the trainer to {own}"
            raise PolicyError(problem, "serve the model that is trained")
        engine_UC = self.experts_UX.view(len(own_UC), self._layers, -1)[:, layer].long()
        if self._weigh is None:
            self._weigh = self._find_weighing(logits_UE, weights_UC, own_UC)
            ordered_UC = engine_UC.sort(-1).values
            if bool(((ordered_UC.diff() == 0) & (ordered_UC[:, 1:] >= 0)).any()):
                raise PolicyError(
                    "the engine names an expert twice for one token, so it does not tell its choice", REMEDY
                )
        choice_UC = engine_UC.where(engine_UC >= 0, own_UC)
        return logits_UE, self._weigh(logits_UE, choice_UC).to(weights_UC.dtype), choice_UC

    @torch.no_grad()  # A layer that is computed again for its gradient must save as much as it did before.
    def _find_weighing(self, logits_UE: Tensor, weights_UC: Tensor, own_UC: Tensor) -> Weigh:
        """How this model's routers weigh a choice."""
        for weigh in (softmax_of_chosen, softmax_of_all):
            if weigh(logits_UE, own_UC).to(weights_UC.dtype).allclose(weights_UC, rtol=1e-2):
                return weigh
        raise PolicyError(f"the routers of {self._kind} models weigh experts in a way that is not known here", REMEDY)


def require_known(experts_TX: Tensor, model: PreTrainedModel) -> None:
    """Raises PolicyError for an expert that the model lacks, before layers index by it, or a rank waits for others."""
    count = getattr(model.config.get_text_config(decoder=True), "num_local_experts", None)
    if count is not None and (highest := int(experts_TX.max())) >= count:
        problem = f"the engine tells expert {highest}, and the trainer's model has {count}, from 0 on"
        raise PolicyError(problem, "serve the model that is trained")


def softmax_of_chosen(logits_UE: Tensor, choice_UC: Tensor) -> Tensor:
    """Weights that sum to 1 over the chosen experts."""
    return logits_UE.float().gather(-1, choice_UC).softmax(-1)


def softmax_of_all(logits_UE: Tensor, choice_UC: Tensor) -> Tensor:
    """Weights that sum to 1 over all experts."""
    return logits_UE.float().softmax(-1).gather(-1, choice_UC)
