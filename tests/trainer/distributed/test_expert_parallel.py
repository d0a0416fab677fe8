"""Expert parallelism: ranks that shard experts give the losses, gradient norms and weights of one process."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.trainer.distributed.expert_models import EXPERTS, KINDS, save_expert_model
from tests.trainer.distributed.rank_pools import make_updater, running_ranks
from tests.trainer.distributed.test_any_number_of_ranks import batches_of
from tests.trainer.distributed.test_context_parallel import require_same
from trainer.algorithms.settings import AlgorithmSettings
from trainer.distributed.expert_parallel import find_experts
from trainer.distributed.rank_commands import LeaderChannel
from trainer.policy.settings import PolicyError, UpdateSettings

CASE = "dapo, KL in the reward"


@pytest.fixture(scope="module", params=[2, 4], ids=["2", "4, two for each row"])
def channel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeaderChannel]:
    """Ranks that stay alive for all tests; four of them have one expert each."""
    folder, context = tmp_path_factory.mktemp("ranks"), request.param // 2
    with running_ranks(request.param, folder, expert_parallel=True, context_parallel=context) as channel:
        yield channel


@pytest.fixture(scope="module", params=KINDS)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_expert_model(folder, request.param)
    return folder


def test_losses_gradients_and_weights_are_those_of_one_process(channel: LeaderChannel, mixture: Path) -> None:
    require_same(CASE, mixture, channel)


def test_rank_whose_experts_get_no_tokens_keeps_up_with_the_others(channel: LeaderChannel, tmp_path: Path) -> None:
    model = save_expert_model(tmp_path, "mixtral")
    model.config.num_experts_per_tok = 1
    for name, value in model.named_parameters():
        if name.endswith(".gate.weight"):  # The first two experts share all tokens between them.
            value.data[1], value.data[2:] = -value.data[0], 0
    model.save_pretrained(tmp_path)
    require_same("rloo, gradient checkpointing", tmp_path, channel)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_experts_that_the_engine_told_are_taken_in_either_precision(
    dtype: str, tolerance: float, channel: LeaderChannel, mixture: Path
) -> None:
    def choose(ids: Sequence[int]) -> Iterator[int]:
        """Two experts of each of two layers, by the tokens so far: ranks that have a prefix agree on it."""
        for end in range(len(ids)):
            draw = Random(str(ids[: end + 1]))
            yield from (*draw.sample(range(EXPERTS), 2), *draw.sample(range(EXPERTS), 2))

    batch = batches_of(CASE, mixture)[0]
    told = tuple(replace(each, experts=array("h", choose(each.ids))) for each in batch.sequences)
    metrics = []
    for place in (None, channel):
        _, updater = make_updater(place, mixture, AlgorithmSettings(), UpdateSettings(dtype=dtype))
        metrics.append(updater.train_step(replace(batch, sequences=told)))
    alone, shared = metrics
    assert shared["update/grad_norm"] == pytest.approx(alone["update/grad_norm"], rel=tolerance)
    assert shared["mismatch/replayed"] == alone["mismatch/replayed"] == 1


def test_each_rank_has_its_experts_alone_and_checkpoints_resume_anywhere(
    channel: LeaderChannel, mixture: Path, tmp_path: Path
) -> None:
    algorithm, update = AlgorithmSettings.model_validate({"name": "cispo"}), UpdateSettings(lr=1e-4)
    first, second = batches_of(CASE, mixture)[:2]
    policy, updater = make_updater(channel, mixture, algorithm, update)
    experts = find_experts(policy.model, channel.ranks.size)
    with pytest.raises(PolicyError, match="3 ranks do not divide the model's 4 experts"):
        find_experts(policy.model, 3)
    computed: list[int] = []

    def note_size(module: Any, *_: Any) -> None:
        if module not in experts:  # Its own part of them.
            computed.append(len(module.down_proj))

    for module in experts:
        module.forward._own.register_forward_hook(note_size)
    updater.train_step(first)
    assert set(computed) == {EXPERTS // channel.ranks.size}
    finish = policy.save(tmp_path)
    assert finish is not None and finish()
    expected = updater.train_step(second)
    for place in (channel, None):
        resumed, resumed_updater = make_updater(place, mixture, algorithm, update)
        resumed.resume(tmp_path)
        metrics = resumed_updater.train_step(second)
        for name in ("loss", "update/grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
