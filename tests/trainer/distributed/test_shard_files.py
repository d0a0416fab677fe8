"""A rank's part of a weight, read from files."""

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


def test_weights_stay_when_their_file_is_written_over(tmp_path: Path) -> None:
    """As by an export to the folder that the run began with."""
    skeleton = tiny_model(tie_word_embeddings=True)
    skeleton.save_pretrained(tmp_path)
    name, value = next(iter(skeleton.named_parameters()))
    with ShardFiles(tmp_path, skeleton) as files:
        part = files.read(name, value.shape, (slice(0, 2), slice(None)))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert torch.equal(part, value[:2])
