"""A rank's part of a weight, read from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.distributed.expert_models import EXPERTS, KINDS, save_expert_model
from tests.trainer.policy.tiny_policies import tiny_model
from trainer.distributed import shard_files
from trainer.distributed.shard_files import ShardFiles
from trainer.model import build_skeleton, load_model


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


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_stacked_experts_are_made_of_the_experts_stored_tensors_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other places than ranks have: some columns only, or no expert."""
    save_expert_model(tmp_path, kind)
    whole, skeleton = load_model(tmp_path).state_dict(), build_skeleton(tmp_path)
    monkeypatch.delattr(shard_files, "load_model")
    opened: list[str] = []
    with ShardFiles(tmp_path, skeleton) as files:
        open_slice = files._open
        monkeypatch.setattr(files, "_open", lambda name: (opened.append(name), open_slice(name))[1])
        for name, value in skeleton.named_parameters():
            rest = tuple(slice(0, size) for size in value.shape[1:])
            columns = (slice(0, 2), *rest[1:]) if rest else ()
            for place in ((slice(0, 1), *rest), (slice(1, value.shape[0]), *columns), (slice(EXPERTS, EXPERTS), *rest)):
                opened.clear()
                assert torch.equal(files.read(name, value.shape, place), whole[name][place]), name
                if ".experts." in name:
                    numbers = {int(stored.split(".experts.")[1].split(".")[0]) for stored in opened}
                    assert numbers == {*range(*place[0].indices(EXPERTS))}


def test_experts_that_are_stored_in_another_way_are_read_with_the_whole_model(tmp_path: Path) -> None:
    """Here one is missing from a stack, as of a file that was half converted."""
    model = save_expert_model(tmp_path, "mixtral")
    name, value = next((name, value) for name, value in model.named_parameters() if name.endswith(".down_proj"))
    place = (slice(1, 3), *(slice(0, size) for size in value.shape[1:]))
    with ShardFiles(tmp_path, build_skeleton(tmp_path)) as files:
        (names,) = files._stored[name].names.values()
        names.pop()
        assert torch.equal(files.read(name, value.shape, place), value[place])
