"""Weights as a checkpoint's files have them: in memory, a model may name and lay them out in another way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def filed(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What is copied for it, as experts that lie in one tensor are, is on the device of the weights. Of those that are
    tied, one is to be given: the order is another one afterwards."""
    with torch.no_grad():
        made: Mapping[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return made
