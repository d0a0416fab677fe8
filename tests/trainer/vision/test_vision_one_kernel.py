"""Attention in one kernel gives the values and gradients of the blocks with images, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.policy.tiny_policies import model_gradient
from tests.trainer.vision.vision_models import picture
from tests.trainer.vision.vision_sequences import looked
from trainer.algorithms.packing import pack
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import trained_tokens
from trainer.vision.image_processor import ImageProcessor


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as on a CPU
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that torch looks at, and hides from others
def test_rows_with_images_have_the_values_and_gradients_of_the_blocks(
    kind: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # Refuses gradients.
    processor, first, second = ImageProcessor.load(kind), picture(1), picture(2, 24, 16)
    assert processor is not None
    shown = [[first, second], [first], [second, second], [first, second]]
    batch = pack([looked(processor, images, seed, 1.0) for seed, images in enumerate(shown)])
    policy, found = Policy.load(kind, UpdateSettings()), []
    assert not policy.logprob_reader.fallback_reason
    for policy.logprob_reader.one_kernel in (False, True):
        logprobs_T = policy.logprob_reader.compute_batch_logprobs(trained_tokens(batch, 1.0)).logprobs_T
        policy.zero_grad()
        logprobs_T.sum().backward()  # type: ignore[no-untyped-call]
        gradient = model_gradient(policy.model)
        found.append((logprobs_T.detach(), gradient / gradient.abs().max()))
    for expected, computed in zip(*found, strict=True):
        assert torch.allclose(computed, expected, atol=1e-5) and float(expected.abs().max()) > 0
