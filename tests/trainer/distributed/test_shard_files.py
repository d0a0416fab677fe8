"""A rank's part of a weight, read from files."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.trainer.distributed.expert_models import save_expert_model
from trainer.distributed.shard_files import ShardFiles
from trainer.model import build_skeleton


def test_experts_that_are_stored_in_another_way_are_read_with_the_whole_model(tmp_path: Path) -> None:
    """Here one is missing from a stack, as of a file that was half converted."""
    model = save_expert_model(tmp_path, "mixtral")
    name, value = next((name, value) for name, value in model.named_parameters() if name.endswith(".down_proj"))
    place = (slice(1, 3), *(slice(0, size) for size in value.shape[1:]))
    with ShardFiles(tmp_path, build_skeleton(tmp_path)) as files:
        (names,) = files._stored[name].names.values()
        names.pop()
        assert torch.equal(files.read(name, value.shape, place), value[place])
