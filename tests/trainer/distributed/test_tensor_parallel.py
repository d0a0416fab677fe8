"""Tensor parallelism: ranks that share every matrix give the losses, gradient norms and weights of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.trainer.distributed.rank_pools import make_updater, running_ranks
from tests.trainer.distributed.test_any_number_of_ranks import batches_of
from tests.trainer.distributed.test_context_parallel import TOLERANCE, require_same
from tests.trainer.policy.tiny_policies import SIZES, tiny_model
from tests.trainer.vision.vision_models import seeing_model
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.rank_commands import LeaderChannel
from trainer.distributed.sharded_model import find_styles
from trainer.distributed.sharded_weights import ShardedWeights
from trainer.policy.policy import Policy
from trainer.policy.settings import PolicyError, UpdateSettings
from trainer.policy.update import PolicyUpdater

WEIGHT_TOLERANCE = 1e-4
"""AdamW divides each gradient by its size, so that what is left of rounding where one is nearly 0 moves a weight by a
part of the rate at each step: 3.8e-5 was seen."""
CASES = (
    "grpo, KL in the loss, two epochs of two minibatches",
    "gspo, LoRA, KL in the loss",
    "reinforce_pp, gae",
    "images",
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_model(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl")


@pytest.fixture(scope="module", params=[(2, False), (4, True)], ids=["1x2", "2x2, offloaded"])
def channel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeaderChannel]:
    """Ranks that stay alive for all tests; two share every matrix."""
    ranks, offload = request.param
    with running_ranks(ranks, tmp_path_factory.mktemp("ranks"), tensor_parallel=2, offload=offload) as channel:
        yield channel


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_are_those_of_one_process(
    case: str, channel: LeaderChannel, model: Path, seeing: Path
) -> None:
    require_same(case, seeing if case == "images" else model, channel, WEIGHT_TOLERANCE)


def open_cispo(model: Path, channel: LeaderChannel | None) -> tuple[Policy, PolicyUpdater]:
    return make_updater(channel, model, AlgorithmSettings.model_validate({"name": "cispo"}), UpdateSettings(lr=1e-4))


def test_buckets_are_whole_and_checkpoints_resume_on_ranks_and_in_one_process(
    channel: LeaderChannel, model: Path, tmp_path: Path
) -> None:
    batches = batches_of("cispo", model)
    alone, updater_alone = open_cispo(model, None)
    policy, updater = open_cispo(model, channel)
    require_close(updater.train_step(batches[0]), updater_alone.train_step(batches[0]))
    finish, _ = policy.save(tmp_path / "ranks"), alone.save(tmp_path / "alone")
    assert finish is not None and finish()
    assert isinstance(policy.weights, ShardedWeights)
    buckets = policy.weights.buckets(3000)
    gathered = {name: value for bucket in buckets for name, value in bucket}
    different = max(float((value - alone.weights[name].detach()).abs().max()) for name, value in gathered.items())
    assert len(buckets) > 3 and different < WEIGHT_TOLERANCE
    expected = {"ranks": updater.train_step(batches[1]), "alone": updater_alone.train_step(batches[1])}
    for source, metrics in expected.items():
        for place in (channel, None):
            resumed, resumed_updater = open_cispo(model, place)
            resumed.resume(tmp_path / source)
            require_close(resumed_updater.train_step(batches[1]), metrics)


def require_close(metrics: Mapping[str, float], expected: Mapping[str, float]) -> None:
    for name in ("loss", "update/grad_norm", "update/lr"):
        assert metrics[name] == pytest.approx(expected[name], rel=TOLERANCE, abs=TOLERANCE), name


@pytest.mark.parametrize(
    ("model_of", "problem"),
    [
        (lambda: tiny_model("qwen2"), "`distributed.tensor_parallel: 2` does not divide the model's 1 key-value heads"),
        (lambda: odd_model(), "does not divide the 33 columns of model.layers.0.mlp"),
        (
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2)),
            "no plan for the layers of gpt2 models",
        ),
        (lambda: mixture_of_experts(), "qwen3_moe models have layers of the style"),
    ],
)
def test_model_that_cannot_be_split_so_is_refused_by_name(
    model_of: Callable[[], PreTrainedModel], problem: str
) -> None:
    with pytest.raises(PolicyError) as caught, torch.device("meta"):
        find_styles(model_of(), 2)
    assert problem in caught.value.problem and "distributed.tensor_parallel: 1" in str(caught.value.remedy)


def odd_model() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | {"intermediate_size": 33}, num_key_value_heads=2, head_dim=8))  # type: ignore[arg-type]


def mixture_of_experts() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SIZES, num_key_value_heads=2, head_dim=8, num_experts=4, moe_intermediate_size=8)  # type: ignore[arg-type]
    return Qwen3MoeForCausalLM(config)
