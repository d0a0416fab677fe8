"""What is learned from is what was seen: packed or alone, rows with pictures are read as the model reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.vision.rows import looked, told
from tests.trainer.vision.seeing import logprobs, picture
from trainer.learn.batch import Batch, pack
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.vision.eyes import Eyes

FIRST, SECOND = picture(1), picture(2, 24, 16)
ROWS = ((FIRST,), (FIRST, SECOND), (SECOND, FIRST, FIRST), (), (FIRST, SECOND))


def policy_of(folder: Path, **settings: object) -> Policy:
    return Policy.load(folder, UpdateSettings.model_validate({"lr": 1e-2, **settings}))


def packed(eyes: Eyes) -> Batch:
    return pack([looked(eyes, images, seed=place // 2) for place, images in enumerate(ROWS)])


def own(folder: Path, eyes: Eyes) -> list[float]:
    """Row by row, from pixels to logits."""
    return [
        value
        for place, images in enumerate(ROWS)
        for value in [0.0, *logprobs(folder, eyes, told(eyes, len(images), place // 2), list(images))]
    ]


@pytest.mark.parametrize("alone", [False, True])
def test_rows_with_pictures_are_read_as_the_model_reads_them(kind: Path, alone: bool) -> None:
    policy = policy_of(kind)
    assert policy.eyes is not None and policy.reader.note == ""
    batch = packed(policy.eyes)
    if alone:
        policy.reader.note = "as if it could not be packed"
        policy.model.get_submodule(policy.eyes.family.words).set_attn_implementation("sdpa")  # type: ignore[operator]
    everything = torch.ones_like(batch.mask_T)
    with torch.no_grad():
        read = policy.read(batch.ids_T, batch.sequence_T, everything, images=batch.images)
    words = batch.ids_T >= 0  # Nobody writes pictures.
    expected_T = torch.tensor(own(kind, policy.eyes))
    assert read.logprobs_T[words].tolist() == pytest.approx(expected_T[words].tolist(), abs=1e-5)
    assert int((~words).sum()) == sum(policy.eyes.look(image).width for images in ROWS for image in images)
    assert [one.data for one in batch.images] == [FIRST.data, SECOND.data]
