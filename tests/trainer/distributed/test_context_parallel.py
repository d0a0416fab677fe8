"""Context parallelism: ranks that share every row give the losses, gradient norms and weights of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer.distributed.rank_pools import make_updater, random_batch, running_ranks
from tests.trainer.distributed.test_any_number_of_ranks import NOISY, batches_of, open_case, run_alone
from tests.trainer.policy.tiny_policies import SIZES, tiny_model
from tests.trainer.vision.vision_models import seeing_model
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.errors import RankError
from trainer.distributed.rank_commands import LeaderChannel
from trainer.distributed.settings import DistributedSettings, count_shards
from trainer.policy.optimizers import clip_gradients
from trainer.policy.prefix_forest import build_forest
from trainer.policy.ranks import OneRank, measure_ranks
from trainer.policy.settings import PolicyError, UpdateSettings

TOLERANCE = 1e-5
"""Relative to the value, or to 1: sums over tokens have other orders, and 5e-7 was seen. Products of a split matrix are
rounded once for each part, too: 3.4e-6 was seen at the last steps."""
CASES = (
    "grpo, KL in the loss, two epochs of two minibatches",
    "gspo, LoRA, KL in the loss",
    "reinforce_pp, gae",
    "a teacher's most likely tokens",
    "images",
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("seeing"), "qwen3_vl")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four heads, of which two share keys and values."""
    folder = tmp_path_factory.mktemp("grouped")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, "num_attention_heads": 4}
    Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "settings", [{"context_parallel": 4}, {"context_parallel": 2, "tensor_parallel": 2}], ids=["4", "2, by matrices"]
)
def test_keys_and_values_of_fewer_heads_than_ranks_are_repeated(
    settings: dict[str, int], grouped: Path, tmp_path: Path
) -> None:
    with running_ranks(4, tmp_path, **settings) as channel:
        require_same("rloo, gradient checkpointing", grouped, channel)


def test_each_rank_runs_its_part_of_the_nodes_also_in_bfloat16(model: Path, tmp_path: Path) -> None:
    batch = random_batch(tiny_model(tie_word_embeddings=True), 1)
    ids_T = torch.tensor([token for sequence in batch.sequences for token in sequence.ids])
    sequence_T = torch.tensor([index for index, each in enumerate(batch.sequences) for _ in each.ids])
    nodes = len(build_forest(ids_T, sequence_T).ids_U)
    update, widths = UpdateSettings(dtype="bfloat16"), []
    _, updater_alone = make_updater(None, model, AlgorithmSettings(), update)
    expected = updater_alone.train_step(batch)
    with running_ranks(2, tmp_path, context_parallel=2) as channel:
        policy, updater = make_updater(channel, model, AlgorithmSettings(), update)
        policy.model.base_model.layers[0].register_forward_hook(lambda *call: widths.append(call[1][0].shape[1]))
        metrics = updater.train_step(batch)
    assert nodes > 100 and widths == [-(-nodes // 2)]
    assert metrics["update/grad_norm"] == pytest.approx(expected["update/grad_norm"], rel=0.05)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ranks": 3, "context_parallel": 2}, "`distributed.context_parallel: 2` does not divide 3 ranks"),
        ({"ranks": 4, "context_parallel": 4}, "context_parallel: 4` does not divide the model's 2 attention heads"),
        ({"ranks": 4, "context_parallel": 2, "tensor_parallel": 2}, "times `tensor_parallel: 2` does not divide the"),
        ({"expert_parallel": True}, "`distributed.expert_parallel` shards experts over ranks, and there is one"),
        ({"ranks": 2, "expert_parallel": True}, "qwen3 models have no experts that are stacked"),
        ({"ranks": 4, "shard": 2, "expert_parallel": True}, "`distributed.expert_parallel` works with neither copies"),
        ({"ranks": 2, "offload": True, "expert_parallel": True}, "with neither copies of the weights nor offloading"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name_before_anything_starts(
    settings: dict[str, Any], problem: str, model: Path
) -> None:
    with pytest.raises((PolicyError, RankError)) as caught:
        count_shards(DistributedSettings(**settings), model)
    assert problem in caught.value.problem and caught.value.remedy


def test_tokens_of_a_row_count_once_for_all_ranks_that_share_it() -> None:
    class FourRanks(OneRank):
        size, shares = 4, 2

        def gather(self, value: Any) -> list[Any]:
            return [value] * self.size

        def take_busy_s(self) -> float:
            return 2.0

    metrics = measure_ranks(FourRanks(), 100)
    assert [metrics[f"distributed/tokens_per_s/rank_{rank}"] for rank in range(4)] == [25.0] * 4


# From here on, tests share their ranks; a process has those of one pool at a time.


@pytest.fixture(scope="module", params=[2, 4], ids=["1x2", "2x2, offloaded"])
def channel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeaderChannel]:
    """Ranks that stay alive for all tests; two share every row, and two of four a copy of the weights."""
    options = {"shard": 2, "offload": True} if request.param == 4 else {}
    with running_ranks(request.param, tmp_path_factory.mktemp("ranks"), context_parallel=2, **options) as channel:
        yield channel


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(
    case: str, channel: LeaderChannel, model: Path, seeing: Path
) -> None:
    if "teacher" in case:
        tiny_model(tie_word_embeddings=True).save_pretrained(model / "teacher")
    require_same(case, seeing if case == "images" else model, channel)


def require_same(case: str, model: Path, channel: LeaderChannel, tolerance: float = TOLERANCE) -> None:
    expected, weights = run_alone(case, model)
    policy, updater = open_case(case, model, channel)
    for batch, metrics in zip(batches_of(case, model), expected, strict=False):
        shared = {name: value for name, value in updater.train_step(batch).items() if "distributed/" not in name}
        assert shared.keys() == metrics.keys()
        for name in shared.keys() - NOISY:
            assert shared[name] == pytest.approx(metrics[name], rel=TOLERANCE, abs=TOLERANCE), name
    gathered = policy.weights
    assert gathered.keys() == weights.keys()
    assert max(float((gathered[name] - value).abs().max()) for name, value in weights.items()) < tolerance


def test_critics_gradient_counts_each_token_once(
    channel: LeaderChannel, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW would hide a gradient that is as many times too large."""
    norms: list[float] = []

    def note_norm(*arguments: Any) -> torch.Tensor:
        norms.append(float(norm := clip_gradients(*arguments)))
        return norm

    monkeypatch.setattr("trainer.policy.critic.clip_gradients", note_norm)
    case = "reinforce_pp, gae"
    for place in (None, channel):
        _, updater = open_case(case, model, place)
        for batch in batches_of(case, model)[:2]:
            updater.train_step(batch)
    assert norms[2:] == pytest.approx(norms[:2], rel=TOLERANCE) and min(norms) > 0
