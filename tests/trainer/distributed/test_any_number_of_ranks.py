"""Training with 1, 2 and 4 ranks gives the same losses, gradient norms, metrics, weights and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.distributed.expert_models import save_expert_model
from tests.trainer.distributed.rank_pools import (
    image_batch,
    make_updater,
    random_batch,
    running_ranks,
    save_wider_model,
)
from tests.trainer.policy.tiny_policies import tiny_model
from tests.trainer.vision.vision_models import seeing_model
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.train_batch import TrainBatch
from trainer.distributed.rank_commands import LeaderChannel
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.vision.image_processor import ImageProcessor

STEPS = 4
"""Optimizer steps."""
TOLERANCE = 1e-6
"""Relative to the value, or to 1 if that is larger: a policy gradient's loss is often 0 up to rounding, and a small
gradient the rest of large ones that cancel, of which float32 leaves fewer digits."""
LEARNING_RATE = 2e-4
"""Adam turns a weight's rounding error into a step of this size if the weight's gradient is nothing else."""
KL = {"coefficient": 0.1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo, KL in the loss, two epochs of two minibatches": ({"kl": {**KL, "in_reward": False}},
     {"minibatches": 2, "epochs": 2, "micro_batch_tokens": 64}),
    "dapo, KL in the reward": ({"name": "dapo", "kl": {**KL, "in_reward": True}}, {"micro_batch_tokens": 96}),
    "gspo, LoRA, KL in the loss": ({"name": "gspo", "kl": {**KL, "in_reward": False}},
     {"lora": {"rank": 4}, "gradient_checkpointing": "feed_forward"}),
    "reinforce_pp, gae": ({"name": "reinforce_pp", "credit": {"kind": "gae"}},
     {"critic": {}, "micro_batch_tokens": 64}),
    "rloo, gradient checkpointing": ({"name": "rloo"}, {"gradient_checkpointing": True}),
    "experts, LoRA": ({"name": "grpo"}, {"lora": {"rank": 4}}),
    "a teacher, LoRA": ({"name": "grpo"}, {"lora": {"rank": 4}, "minibatches": 2}),
    "a teacher's most likely tokens": ({"name": "grpo"}, {"micro_batch_tokens": 64}),
    "images": ({"name": "grpo"}, {"micro_batch_tokens": 48}),
    "images, every second step without any, gae": ({"name": "reinforce_pp", "credit": {"kind": "gae"}},
     {"critic": {}, "micro_batch_tokens": 48}),
}  # fmt: skip
NOISY = {"mismatch/mean", "mismatch/kl", "mismatch/max", "kl/old", "kl/reference"}
"""Metrics that are themselves rounding errors here, or means over a few tokens of tiny differences."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with text, whose head is tied, one with images, and one of experts."""
    text = tmp_path_factory.mktemp("text")
    tiny_model(tie_word_embeddings=True).save_pretrained(text)
    save_wider_model(text / "teacher")
    experts = tmp_path_factory.mktemp("experts")
    save_expert_model(experts, "qwen3_moe")
    return {"text": text, "images": seeing_model(tmp_path_factory.mktemp("images"), "qwen3_vl"), "experts": experts}


@pytest.fixture(scope="module", params=[2, 4])
def channel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeaderChannel]:
    """Ranks that stay alive for all tests; two of four share a copy of the weights."""
    shard = 2 if request.param == 4 else None
    with running_ranks(request.param, tmp_path_factory.mktemp("ranks"), shard=shard) as channel:
        yield channel


@cache
def batches_of(case: str, model: Path) -> list[TrainBatch]:
    if case.startswith("images"):
        processor = ImageProcessor.load(model)
        assert processor is not None
        most = (2, 0) if "without any" in case else (2, 2)
        return [image_batch(processor, seed, most[seed % 2]) for seed in range(STEPS)]
    return [random_batch(tiny_model(tie_word_embeddings=True), seed) for seed in range(STEPS)]


def open_case(case: str, model: Path, channel: LeaderChannel | None) -> tuple[Policy, PolicyUpdater]:
    algorithm, update = CASES[case]
    if "teacher" in case:
        teacher = {"model": str(model / "teacher")}
        algorithm = {**algorithm, "kl": {"reference": teacher, "top_k": 5 if "likely" in case else 0}}
    settings = (
        AlgorithmSettings.model_validate(algorithm),
        UpdateSettings.model_validate({"lr": LEARNING_RATE, **update}),
    )
    return make_updater(channel, model, *settings)


@cache
def run_alone(case: str, model: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    policy, updater = open_case(case, model, None)
    update = policy.settings
    batches = batches_of(case, model)[: STEPS // (update.minibatches * update.epochs)]
    return [updater.train_step(batch) for batch in batches], dict(policy.weights)


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_do_not_depend_on_the_number_of_ranks(
    case: str, channel: LeaderChannel, models: dict[str, Path]
) -> None:
    model = models[next((kind for kind in models if case.startswith(kind)), "text")]
    expected, weights = run_alone(case, model)
    policy, updater = open_case(case, model, channel)
    for batch, metrics in zip(batches_of(case, model), expected, strict=False):
        sharded = updater.train_step(batch)
        assert sharded["distributed/imbalance"] >= 1
        idle = [sharded[f"distributed/idle/rank_{rank}"] for rank in range(channel.ranks.size)]
        assert min(idle) == 0 and max(idle) <= 1
        assert any(sharded.get(f"distributed/tokens_per_s/rank_{rank}") for rank, _ in enumerate(idle))
        sharded = {name: value for name, value in sharded.items() if not name.startswith("distributed/")}
        assert sharded.keys() == metrics.keys()
        for name in sharded.keys() - NOISY:
            assert sharded[name] == pytest.approx(metrics[name], rel=TOLERANCE, abs=TOLERANCE), name
    gathered = policy.weights
    assert gathered.keys() == weights.keys()
    assert max(float((gathered[name] - value).abs().max()) for name, value in weights.items()) < 1e-5
