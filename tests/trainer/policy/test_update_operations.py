"""An update waits for a GPU as rarely as it can, rounds and copies little, and plans each pass once, in a thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.operation_counter import count_update
from tests.trainer.policy.tiny_policies import example_batch, tiny_model
from tests.trainer.vision.vision_models import picture, seeing_model
from tests.trainer.vision.vision_rollouts import lesson_of, play
from trainer.algorithms.settings import AlgorithmSettings
from trainer.policy.logprobs import LogprobReader, PassPlan
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater
from trainer.vision.family import ImageFeatures
from trainer.vision.qwen_vl import Qwen2VL

GRPO = {"name": "grpo"}
KL = {"name": "grpo", "kl": {"coefficient": 0.1}}
GAE = {"name": "reinforce_pp", "credit": {"kind": "gae"}}
TWO_STEPS = {"minibatches": 2}
LAYERS = (2, 4)


def make_updater(algorithm: dict[str, Any], layers: int = 2, **update: Any) -> PolicyUpdater:
    settings = AlgorithmSettings.model_validate(algorithm)
    critic = {"critic": {}} if algorithm is GAE else {}
    policy = Policy(tiny_model(num_hidden_layers=layers), UpdateSettings.model_validate({**update, **critic}))
    reference = LogprobReader(tiny_model(num_hidden_layers=layers), 1024, policy.logprob_reader.dtype)
    return PolicyUpdater(policy, settings, exact=False, reference=reference, deterministic=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [24, 10_000], ids=["many micro-batches", "one micro-batch"])
@pytest.mark.parametrize(
    ("algorithm", "update", "reads"),
    [
        (GRPO, {}, 2),  # The numbers of all losses, and the norm of the gradient.
        (KL, {}, 2),
        (GRPO, TWO_STEPS, 6),  # The same twice, and the old logprobs: a sample, and whether all are finite.
        (GAE, {}, 5),  # The critic's losses, the norm of its gradient, and how many tokens it learns, on the host.
    ],
)
def test_step_reads_as_often_however_many_micro_batches_it_has(
    algorithm: dict[str, Any], update: dict[str, Any], reads: int, tokens: int, dtype: str
) -> None:
    updater = make_updater(algorithm, dtype=dtype, micro_batch_tokens=tokens, **update)
    steps = update.get("minibatches", 1)
    reads += steps * (dtype == "bfloat16")  # The share of weights that a step changed.
    assert count_update(updater, example_batch(tiny_model(), groups=4))["reads"] == reads
    assert (updater._total_passes > 2) == (tokens == 24)


@pytest.mark.parametrize("tokens", [64, 10_000], ids=["many micro-batches", "one micro-batch"])
async def test_images_are_placed_without_a_read(tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # But for the vision encoder, whose reads in the host's memory would count here.
    def encode(_: object, __: object, pixels: torch.Tensor, ___: object) -> ImageFeatures:
        return ImageFeatures(pixels.new_ones(len(pixels) // 4, 32))

    folder = seeing_model(tmp_path, "qwen2_vl")
    batch = lesson_of(await play(folder, [picture(1), picture(2, 24, 16)], n=4), AlgorithmSettings())
    monkeypatch.setattr(Qwen2VL, "encode", encode)
    policy = Policy.load(folder, UpdateSettings(micro_batch_tokens=tokens))
    updater = PolicyUpdater(policy, AlgorithmSettings(), exact=False, deterministic=True)
    assert count_update(updater, batch)["reads"] == 2
    assert (updater._total_passes > 2) == (tokens == 64)


@pytest.mark.parametrize(("dtype", "casts", "copies"), [("float32", 0, 5), ("bfloat16", 38, 5)])
def test_layer_has_few_casts_and_copies(dtype: str, casts: int, copies: int) -> None:
    # In bfloat16: norms and positions compute in float32, each of 11 gradients is added to a master's, and each master
    # is rounded, after it was compared.
    few, many = (
        count_update(make_updater(GRPO, layers, dtype=dtype), example_batch(tiny_model())) for layers in LAYERS
    )
    added = {kind: (many[kind] - few[kind]) / (LAYERS[1] - LAYERS[0]) for kind in ("casts", "copies")}
    assert added["casts"] <= casts and added["copies"] <= copies, added


@pytest.mark.parametrize(
    ("algorithm", "update", "kinds"),
    [(GRPO, {}, 1), (KL, {}, 1), (GRPO, {**TWO_STEPS, "epochs": 2}, 1), (GAE, {}, 2)],
    ids=["one pass", "reference", "old logprobs and two epochs", "critic, whose values are of all rows"],
)
def test_plan_is_made_once_for_all_passes_over_a_micro_batch_and_in_the_thread(
    algorithm: dict[str, Any], update: dict[str, Any], kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = make_updater(algorithm, micro_batch_tokens=24, **update)
    make, planned = PassPlan.make, list[str]()

    def note(*inputs: Any) -> PassPlan:
        planned.append(threading.current_thread().name)
        return make(*inputs)

    monkeypatch.setattr(PassPlan, "make", note)
    updater.train_step(example_batch(tiny_model(), groups=4, rewards=tuple(map(float, range(12)))))
    micro_batches = updater._total_passes // updater._policy.settings.epochs
    assert micro_batches > 2 and planned == ["plan_0"] * kinds * micro_batches
