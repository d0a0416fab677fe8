"""Tests importance ratios of stale tokens: to the policy that sampled them, or to the proximal policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.policy.tiny_policies import example_batch, model_gradient, policy_logprobs, tiny_model
from trainer.algorithms.advantages import compute_token_advantages
from trainer.algorithms.loss import measure_mismatch
from trainer.algorithms.settings import AlgorithmSettings, MismatchSettings
from trainer.algorithms.train_batch import TrainBatch
from trainer.policy.microbatch import MetricMeans
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import PolicyUpdater

GRPO = AlgorithmSettings(aggregate="token")
DECOUPLED = AlgorithmSettings(aggregate="token", ratio="proximal", mismatch=MismatchSettings(truncate="token", cap=1.1))


def make_stale(batch: TrainBatch, off: float = 0.15) -> TrainBatch:
    """Marks the first turn of each rollout as stale, with engine logprobs that differ by `off`."""
    sequences = []
    for index, sequence in enumerate(batch.sequences):
        stale = [turn == 0 for turn in sequence.turns]
        sign = 1 if index % 2 else -1
        engine = [
            value + sign * off * is_stale for value, is_stale in zip(sequence.engine_logprobs, stale, strict=True)
        ]
        sequences.append(replace(sequence, stale=stale, engine_logprobs=engine))
    return replace(batch, sequences=tuple(sequences))


def train_gradient(batch: TrainBatch, algorithm: AlgorithmSettings, **update: Any) -> tuple[Tensor, dict[str, float]]:
    policy = Policy(tiny_model(), UpdateSettings(**update))
    policy.step = lambda: {}  # type: ignore[method-assign]
    metrics = PolicyUpdater(policy, algorithm, exact=True).train_step(batch)
    return model_gradient(policy.model), metrics


def loop_gradient(batch: TrainBatch, decoupled: bool) -> Tensor:
    """The gradient by loops: each token's clipped ratio to its old policy, weighted if that did not sample it."""
    policy = Policy(tiny_model(), UpdateSettings())
    losses, count = [], 0.0
    for row in compute_token_advantages(batch, GRPO).rows:
        new_T = policy_logprobs(policy, [list(row.ids)])
        for token, weight in enumerate(row.weights):
            if not weight:
                continue
            trainer, engine = float(new_T[token].detach()), row.engine_logprobs[token]
            old = trainer if decoupled or not row.stale[token] else engine
            ratio, advantage = (new_T[token] - old).exp(), row.advantages[token]
            factor = min(1.1, torch.tensor(trainer - engine).exp().item()) if decoupled else 1.0
            losses.append(-factor * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    count = compute_token_advantages(batch, GRPO).totals.weight
    (torch.stack(losses).sum() / count).backward()  # type: ignore[no-untyped-call]
    return model_gradient(policy.model)


@pytest.mark.parametrize("algorithm", [GRPO, DECOUPLED], ids=["sampled", "proximal"])
def test_gradient_of_stale_tokens_is_importance_weighted(algorithm: AlgorithmSettings) -> None:
    batch = make_stale(example_batch(tiny_model(), groups=3))
    gradient, metrics = train_gradient(batch, algorithm)
    assert torch.allclose(gradient, loop_gradient(batch, algorithm is DECOUPLED), atol=1e-5)
    plain, _ = train_gradient(example_batch(tiny_model(), groups=3), GRPO)
    assert not torch.allclose(gradient, plain, atol=1e-3)
    assert metrics["staleness/kl"] == pytest.approx(0.15**2 / 2, rel=0.1) and metrics["mismatch/max"] < 1e-5


def test_ratio_that_is_clipped_by_staleness_has_no_gradient() -> None:
    batch = make_stale(example_batch(tiny_model(), rewards=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)), off=-0.5)
    gradient, metrics = train_gradient(batch, GRPO)
    assert metrics["clipped"] > 0 and torch.allclose(gradient, loop_gradient(batch, False), atol=1e-5)


@pytest.mark.parametrize("fresh", [True, False])
def test_several_optimizer_steps_keep_the_engines_logprobs_of_stale_tokens(fresh: bool) -> None:
    """With an exact engine, fresh tokens keep its logprobs; without fresh tokens, nothing is recomputed."""
    batch = make_stale(example_batch(tiny_model(), groups=3))
    if not fresh:
        batch = replace(batch, sequences=tuple(replace(sequence, stale=sequence.mask) for sequence in batch.sequences))
    updater = PolicyUpdater(Policy(tiny_model(), UpdateSettings(minibatches=2)), GRPO, exact=True)
    steps = [updater._split_into_micro_batches(compute_token_advantages(batch, GRPO), slice(0, 4), MetricMeans())]
    minibatches, sample = updater._add_old_logprobs(steps)
    (batch,) = [micro_batch.batch for micro_batch in minibatches[0]]
    assert torch.equal(batch.old_logprobs_T, batch.engine_logprobs_T) and (sample is not None) == fresh
    inexact = PolicyUpdater(Policy(tiny_model(), UpdateSettings(minibatches=2)), GRPO, exact=False)
    (recomputed,) = [micro_batch.batch for micro_batch in inexact._add_old_logprobs(steps)[0][0]]
    assert batch.stale_T is not None and torch.equal(
        recomputed.old_logprobs_T[batch.stale_T], batch.engine_logprobs_T[batch.stale_T]
    )
    assert measure_mismatch(recomputed).tokens == (int(batch.fresh_T.sum()) if fresh else 0)


def test_proximal_ratio_recomputes_logprobs_with_an_exact_engine() -> None:
    gradient, metrics = train_gradient(make_stale(example_batch(tiny_model(), groups=3)), DECOUPLED, minibatches=2)
    assert metrics["mismatch/pass_skipped"] == 0.0 and metrics["mismatch/factor"] != 1.0
    assert float(gradient.abs().max()) > 0
