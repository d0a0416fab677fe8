"""A rank's part of a weight, read from files: also the empty part of a rank for which nothing is left."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.trainer.policy.tiny_policies import tiny_model
from trainer.distributed.shard_files import ShardFiles


def test_parts_of_a_weight_are_those_of_the_whole_and_may_be_empty(model: Path) -> None:
    """Of a weight with 8 rows, the last of 24 ranks get none: their part begins where the weight ends."""
    skeleton = tiny_model(tie_word_embeddings=True)
    with ShardFiles(model, skeleton) as files:
        for name, value in skeleton.named_parameters():
            rows, rest = value.shape[0], tuple(slice(0, size) for size in value.shape[1:])
            for start, end in ((0, rows), (1, 3), (rows - 1, rows), (rows, rows)):
                part = files.read(name, value.shape, (slice(start, end), *rest))
                assert part.shape == (end - start, *value.shape[1:]), name
                assert torch.equal(part, value[start:end]), name
