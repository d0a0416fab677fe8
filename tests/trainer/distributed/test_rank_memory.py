"""Ranks with mixed precision train as others do, and each reads only its part of the weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel, Qwen3ForCausalLM

from tests.forked_python import ForkedPopen
from tests.trainer.distributed.expert_models import save_expert_model
from tests.trainer.distributed.rank_pools import make_updater, running_ranks
from tests.trainer.distributed.test_any_number_of_ranks import LEARNING_RATE, batches_of
from tests.trainer.policy.tiny_policies import tiny_model
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.connect_ranks import MODULE
from trainer.distributed.rank_commands import LeaderChannel
from trainer.model import SHARDS_FOLDER
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater

STEPS = 4
RANKS = 4
REPLICATED = 0.02
"""The share of a model that may be read by every rank: nothing but small tensors."""
MEASURED_RANK = '''
"""A rank that writes down how much of the model's files it reads, and how much memory that takes at most."""
import ctypes, json, os, re, sys
from pathlib import Path

from trainer.distributed import follow, sharded_model, sharded_policy
from trainer.distributed.shard_files import ShardFiles

sizes, peaks = [], []
M_MMAP_THRESHOLD = -3
ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 2**16)  # What is freed counts no longer.


class CountingFiles(ShardFiles):
    def read(self, *arguments):
        part = super().read(*arguments)
        peaks.append(allocated())
        return part

    def _open(self, name):
        return CountingSlice(super()._open(name))


class CountingSlice:
    def __init__(self, opened):
        self.opened, self.get_shape = opened, opened.get_shape

    def __getitem__(self, place):
        part = self.opened[place]
        sizes.append(part.nbytes)
        return part


def allocated():
    """Without pages of files, which the system maps as it likes."""
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def build(folder, *arguments):
    sizes.clear(), peaks.clear()
    before = allocated()
    model = plain_build(folder, *arguments)
    measured = {"read": sum(sizes), "allocated": max(peaks) - before}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(measured))
    return model


plain_build, sharded_policy.build_sharded_model = sharded_policy.build_sharded_model, build
sharded_model.ShardFiles = CountingFiles
sys.stdout.flush()
os._exit(follow.main())
'''


def open_updater(channel: LeaderChannel | None, model: Path, **update: Any) -> tuple[Policy, PolicyUpdater]:
    algorithm = AlgorithmSettings.model_validate({"name": "grpo", "kl": {"coefficient": 0.1, "in_reward": False}})
    settings = UpdateSettings.model_validate({"lr": LEARNING_RATE, "micro_batch_tokens": 96, **update})
    return make_updater(channel, model, algorithm, settings)


def train(updater: PolicyUpdater, model: Path) -> list[dict[str, float]]:
    return [updater.train_step(batch) for batch in batches_of("dapo, KL in the reward", model)[:STEPS]]


def farthest(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    return max(float((first[name] - value).abs().max()) for name, value in second.items())


def test_mixed_precision_trains_as_float32_but_for_rounding_and_keeps_float32_weights(
    model: Path, tmp_path: Path
) -> None:
    """The weights change by less than bfloat16 ones would notice, which have 8 bits."""
    policy_alone, updater_alone = open_updater(None, model)
    expected = train(updater_alone, model)
    exact = {name: value.clone() for name, value in policy_alone.weights.items()}
    with running_ranks(2, tmp_path / "ranks") as channel:
        policy, updater = open_updater(channel, model, dtype="bfloat16")
        metrics = train(updater, model)
        finish = policy.save(tmp_path / "saved")
        assert finish is not None and finish()
    policy_alone.resume(tmp_path / "saved")
    weights = dict(policy_alone.weights)
    for first, second in zip(metrics, expected, strict=True):
        for name in ("loss", "update/grad_norm", "kl/reference"):
            assert first[name] == pytest.approx(second[name], rel=0.05, abs=0.05), name
    assert not list((tmp_path / "ranks").glob("*.log")), "no rank had anything to say"
    assert metrics[-1]["loss"] != pytest.approx(expected[-1]["loss"], rel=1e-5), "products are rounded"
    assert farthest(weights, exact) < STEPS * LEARNING_RATE
    before = {name: value.detach() for name, value in tiny_model(tie_word_embeddings=True).named_parameters()}
    assert farthest(weights, before) == pytest.approx(STEPS * LEARNING_RATE, rel=0.5)
    tensors = FileSystemReader(tmp_path / "saved" / SHARDS_FOLDER).read_metadata().state_dict_metadata
    kinds = {value.properties.dtype for value in tensors.values() if isinstance(value, TensorStorageMetadata)}
    assert kinds == {torch.float32}, "weights and optimizer of all ranks"


@pytest.mark.parametrize("kind", ["dense", "mixtral"])
def test_each_rank_reads_and_allocates_only_its_part_of_the_model(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are stored one by one, and stacked in the model."""
    if kind == "dense":
        config = tiny_model(tie_word_embeddings=True).config
        config.hidden_size, config.intermediate_size, config.num_hidden_layers = 256, 2048, 12
        config.layer_types = config.layer_types[:1] * config.num_hidden_layers
        large: PreTrainedModel = Qwen3ForCausalLM(config)
        large.save_pretrained(tmp_path)
    else:
        large = save_expert_model(tmp_path, kind, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    whole = sum(value.nbytes for value in large.parameters())
    assert whole > 5e7
    del large
    (tmp_path / "measured_rank.py").write_text(MEASURED_RANK)
    start = ForkedPopen._execute_child

    def execute_child(self: ForkedPopen, args: Any, *rest: Any) -> None:
        is_rank = [*args] == [sys.executable, "-m", MODULE]
        start(self, [sys.executable, str(tmp_path / "measured_rank.py")] if is_rank else args, *rest)

    monkeypatch.setattr(ForkedPopen, "_execute_child", execute_child)
    with running_ranks(RANKS, tmp_path) as channel:
        for folder in (model, tmp_path):  # The first one also loads libraries.
            make_updater(channel, folder, AlgorithmSettings(), UpdateSettings())
    for rank in range(1, RANKS):
        counts = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert counts["read"] == pytest.approx(whole / RANKS, rel=REPLICATED)
        assert counts["allocated"] < whole * 0.4
