"""The training forward pass with images: packed or single rows equal the model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.vision.vision_models import logprobs, picture
from tests.trainer.vision.vision_sequences import looked, told
from trainer.algorithms.packing import Batch, pack
from trainer.policy.logprobs import PackedTokens
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.vision.image_processor import ImageProcessor

FIRST, SECOND = picture(1), picture(2, 24, 16)
ROWS = ((FIRST,), (FIRST, SECOND), (SECOND, FIRST, FIRST), (), (FIRST, SECOND))


def policy_of(folder: Path, **settings: object) -> Policy:
    return Policy.load(folder, UpdateSettings.model_validate({"lr": 1e-2, **settings}))


def packed(eyes: ImageProcessor) -> Batch:
    return pack([looked(eyes, images, seed=place // 2) for place, images in enumerate(ROWS)])


def own(folder: Path, eyes: ImageProcessor) -> list[float]:
    """Row by row, from pixels to logits."""
    return [
        value
        for place, images in enumerate(ROWS)
        for value in [0.0, *logprobs(folder, eyes, told(eyes, len(images), place // 2), list(images))]
    ]


@pytest.mark.parametrize("alone", [False, True])
def test_rows_with_images_are_read_as_the_model_reads_them(kind: Path, alone: bool) -> None:
    policy = policy_of(kind)
    assert policy.image_processor is not None and policy.logprob_reader.fallback_reason == ""
    batch = packed(policy.image_processor)
    if alone:
        policy.logprob_reader.fallback_reason = "as if it could not be packed"
        policy.model.get_submodule(policy.image_processor.family.text_module).set_attn_implementation("sdpa")  # type: ignore[operator]
    everything = PackedTokens(batch.ids_T, batch.sequence_T, torch.ones_like(batch.mask_T), images=batch.images)
    with torch.no_grad():
        read = policy.logprob_reader.compute_batch_logprobs(everything)
    words = batch.ids_T >= 0  # Nobody writes pictures.
    expected_T = torch.tensor(own(kind, policy.image_processor))
    assert read.logprobs_T[words].tolist() == pytest.approx(expected_T[words].tolist(), abs=1e-5)
    assert int((~words).sum()) == sum(
        policy.image_processor.prepare(image).token_count for images in ROWS for image in images
    )
    assert [one.data for one in batch.images] == [FIRST.data, SECOND.data]
