"""Attention in one kernel gives the values of the blocks with images, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.vision.vision_models import picture
from tests.trainer.vision.vision_sequences import looked
from trainer.algorithms.packing import pack
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import trained_tokens
from trainer.vision.image_processor import ImageProcessor


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as on a CPU
@torch.no_grad()
def test_rows_with_images_have_the_values_of_the_blocks(kind: Path) -> None:
    processor, first, second = ImageProcessor.load(kind), picture(1), picture(2, 24, 16)
    assert processor is not None
    shown = [[first, second], [first], [second, second], [first, second]]
    batch = pack([looked(processor, images, seed, 1.0) for seed, images in enumerate(shown)])
    reader = Policy.load(kind, UpdateSettings()).logprob_reader
    expected = reader.compute_batch_logprobs(trained_tokens(batch, 1.0)).logprobs_T
    assert not reader.fallback_reason
    reader.one_kernel = True
    found = reader.compute_batch_logprobs(trained_tokens(batch, 1.0)).logprobs_T
    assert torch.allclose(found, expected, atol=1e-5) and float(expected.abs().max()) > 0
