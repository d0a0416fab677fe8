"""Tests training steps: determinism, masking of other authors' tokens, old logprobs, KL, memory errors, and critic."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.policy.tiny_policies import example_batch, model_gradient, tiny_model
from trainer.algorithms.advantages import compute_token_advantages
from trainer.algorithms.packing import NotFiniteError, pack
from trainer.algorithms.settings import AlgorithmSettings, CreditSettings, KLSettings
from trainer.algorithms.train_batch import TrainBatch
from trainer.policy.logprobs import Logprobs, PackedTokens
from trainer.policy.policy import Policy
from trainer.policy.settings import CriticSettings, PolicyError, UpdateSettings
from trainer.policy.update import PolicyUpdater, trained_tokens

GRPO = AlgorithmSettings()
GAE = AlgorithmSettings(name="reinforce_pp", credit=CreditSettings(kind="gae", lam=1.0))


def train_one_step(
    train_batch: TrainBatch, algorithm: AlgorithmSettings = GRPO, **update: Any
) -> tuple[Policy, dict[str, float]]:
    policy = Policy(tiny_model(), UpdateSettings(**update))
    return policy, PolicyUpdater(
        policy, algorithm, exact=True, reference=Policy(tiny_model(), UpdateSettings()).logprob_reader
    ).train_step(train_batch)


def max_difference(first: Policy, second: Policy) -> float:
    return max(float((value - second.weights[name]).abs().max()) for name, value in first.weights.items())


def test_step_raises_the_logprobs_of_the_better_rollouts() -> None:
    train_batch = example_batch(tiny_model(), rewards=(1.0, 0.0, 0.0, 1.0, 0.0, 0.0))
    policy, metrics = train_one_step(train_batch, lr=1e-2)
    batch = pack(compute_token_advantages(train_batch, GRPO).rows)
    with torch.no_grad():
        change_T = (
            policy.logprob_reader.compute_batch_logprobs(trained_tokens(batch, 1.0)).logprobs_T
            - batch.engine_logprobs_T
        )
    gain_S = batch.mean_by_sequence(change_T, batch.trained_T)
    assert gain_S[0] > 0 and gain_S[3] > 0 and gain_S[[1, 2, 4, 5]].mean() < 0
    assert policy.steps == 1 and metrics["update/grad_norm"] > 0 and metrics["entropy"] > 0
    assert metrics["kl/old"] == metrics["clipped"] == 0.0 and metrics["mismatch/max"] < 1e-5
    assert metrics["mismatch/pass_skipped"] == 1.0


def test_entropy_bonus_makes_the_policy_less_sure_also_without_a_reward_to_learn() -> None:
    bonus = AlgorithmSettings(entropy_coefficient=1.0)
    train_batch = example_batch(tiny_model(), rewards=(1.0,) * 6)
    policy = Policy(tiny_model(), UpdateSettings(lr=1e-2))
    updater = PolicyUpdater(policy, bonus, exact=True)
    seen = [updater.train_step(train_batch)["entropy"] for _ in range(3)]
    assert seen[0] < seen[1] < seen[2]
    assert train_one_step(train_batch, GRPO)[0].steps == 0, "equal rewards teach nothing else"


def test_adaptive_bonus_begins_when_the_entropy_is_low_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    settings = AlgorithmSettings.model_validate({"adaptive_entropy": {"target": 99, "delta": 0.5, "max": 1.2}})
    train_batch = example_batch(tiny_model(), rewards=(1.0,) * 6)
    policy = Policy(tiny_model(), UpdateSettings(lr=1e-2))
    updater = PolicyUpdater(policy, settings, exact=True)
    seen = [updater.train_step(train_batch) for _ in range(3)]
    assert [step["entropy_coefficient"] for step in seen] == [0.5, 1.0, 1.2]
    assert seen[0]["loss"] == 0 > seen[1]["loss"], "there is no bonus before the first entropy is known"
    policy.save(tmp_path)
    resumed = Policy(tiny_model(), UpdateSettings(lr=1e-2))
    resumed.resume(tmp_path)
    again = PolicyUpdater(resumed, settings, exact=True).train_step(train_batch)
    assert again == updater.train_step(train_batch) and max_difference(policy, resumed) == 0


def test_micro_batches_add_up_and_are_deterministic() -> None:
    train_batch = example_batch(tiny_model(), groups=3, n=4)

    def compute_gradient(tokens: int) -> Tensor:
        policy = Policy(tiny_model(), UpdateSettings(micro_batch_tokens=tokens))
        policy.step = lambda: {}  # type: ignore[method-assign]
        PolicyUpdater(policy, GRPO, exact=True).train_step(train_batch)
        return model_gradient(policy.model)

    whole, parts = compute_gradient(10_000), compute_gradient(24)
    assert torch.allclose(whole, parts, atol=1e-6) and not torch.equal(whole, torch.zeros_like(whole))
    assert torch.equal(parts, compute_gradient(24))


def test_several_optimizer_steps_skip_the_pass_if_the_engine_is_exact() -> None:
    train_batch = example_batch(tiny_model(), groups=3)
    policy, metrics = train_one_step(train_batch, epochs=2, minibatches=3)
    assert policy.steps == 6 and metrics["kl/old"] > 0
    assert metrics["mismatch/pass_skipped"] == 1.0 and 0 <= metrics["mismatch/max"] < 1e-5  # 0 if sums round alike


def test_training_uses_the_sampling_temperature() -> None:
    train_batch = example_batch(tiny_model(), temperature=0.7)
    metrics = [
        PolicyUpdater(Policy(tiny_model(), UpdateSettings()), GRPO, exact=True, temperature=temperature).train_step(
            train_batch
        )
        for temperature in (0.7, 1)
    ]
    assert metrics[0]["mismatch/max"] < 1e-5 < 0.1 < metrics[1]["mismatch/max"]


def test_several_optimizer_steps_recompute_logprobs_if_the_engine_is_not_exact() -> None:
    train_batch = example_batch(tiny_model(), groups=3, off=0.01)
    policy, metrics = train_one_step(train_batch, epochs=2)
    assert metrics["mismatch/pass_skipped"] == 0.0 and metrics["mismatch/mean"] == pytest.approx(0.01, rel=1e-3)
    # The step uses the policy's own logprobs, so the engine's error does not change it.
    assert max_difference(policy, train_one_step(example_batch(tiny_model(), groups=3), epochs=2)[0]) < 1e-6


@pytest.mark.parametrize("in_reward", [False, True])
def test_reference_kl_is_measured_and_limits_the_policy(in_reward: bool) -> None:
    kl = KLSettings(coefficient=50.0, estimator="k2", in_reward=in_reward)
    train_batch = example_batch(tiny_model(), groups=3)
    policy = Policy(tiny_model(), UpdateSettings(lr=1e-2))
    updater = PolicyUpdater(
        policy, AlgorithmSettings(kl=kl), exact=True, reference=Policy(tiny_model(), UpdateSettings()).logprob_reader
    )
    first = updater.train_step(train_batch)
    assert first["kl/reference"] < 1e-8
    without_kl = PolicyUpdater(policy, GRPO, exact=True)
    for _ in range(3):
        without_kl.train_step(train_batch)
    assert policy.steps == 4
    if not in_reward:
        kl_before = updater.train_step(train_batch)["kl/reference"]
        for _ in range(5):
            kl_after = updater.train_step(train_batch)["kl/reference"]
        assert 0 < kl_after < kl_before


def test_logprob_that_is_not_finite_names_its_rollout_and_changes_nothing() -> None:
    train_batch = example_batch(tiny_model())
    policy = Policy(tiny_model(), UpdateSettings(micro_batch_tokens=10))
    original = policy.logprob_reader.compute_batch_logprobs

    def broken(tokens: PackedTokens, *args: Any) -> Logprobs:
        result = original(tokens, *args)
        is_last = tokens.ids_T.tolist() == list(train_batch.sequences[-1].ids)
        return Logprobs(result.logprobs_T * math.nan, result.entropy_T) if is_last else result

    policy.logprob_reader.compute_batch_logprobs = broken  # type: ignore[method-assign]
    with pytest.raises(NotFiniteError, match=f"rollout {train_batch.sequences[-1].name}: token"):
        PolicyUpdater(policy, GRPO, exact=True).train_step(replace(train_batch, rewards=(0.0, 1.0, 0.0, 1.0, 0.0, 1.0)))
    assert max_difference(policy, Policy(tiny_model(), UpdateSettings())) == 0.0
    assert all(value.grad is None for value in policy.model.parameters())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_out_of_memory_names_the_setting_and_changes_nothing(error: Exception) -> None:
    policy = Policy(tiny_model(), UpdateSettings(micro_batch_tokens=10, logits_chunk=4))
    passes = []

    def run_out(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            raise error

    policy.model.get_decoder().layers[1].register_forward_pre_hook(run_out)  # type: ignore[no-untyped-call, union-attr, operator]
    with pytest.raises(PolicyError, match="memory ran out in step 1") as caught:
        PolicyUpdater(policy, GRPO, exact=True).train_step(example_batch(tiny_model()))
    assert caught.value.remedy.startswith("lower `limits.rollout_tokens` or set"), "rows are longer"
    assert all(value.grad is None for value in policy.model.parameters()) and policy.steps == 0


def test_critic_learns_the_return_and_resumes_identically(tmp_path: Path) -> None:
    train_batch = example_batch(tiny_model(), rewards=(2.0,) * 6)
    update = UpdateSettings(critic=CriticSettings(lr=3e-2), lr=1e-4, micro_batch_tokens=24)

    def losses(policy: Policy, steps: int) -> list[float]:
        updater = PolicyUpdater(policy, GAE, exact=True)
        return [updater.train_step(train_batch)["critic/loss"] for _ in range(steps)]

    uninterrupted, interrupted = Policy(tiny_model(), update), Policy(tiny_model(), update)
    metrics = losses(uninterrupted, 12)
    assert metrics[0] == pytest.approx(4.0) and metrics[-1] < 0.5
    first = losses(interrupted, 6)
    interrupted.save(tmp_path)
    resumed = Policy(tiny_model(), update)
    resumed.resume(tmp_path)
    assert first + losses(resumed, 6) == metrics
    assert max_difference(resumed, uninterrupted) == 0.0


def test_plan_of_the_next_pass_is_made_in_a_thread_during_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_model(), UpdateSettings(micro_batch_tokens=20))
    updater, reader, planned = PolicyUpdater(policy, GRPO, exact=True), policy.logprob_reader, threading.Semaphore(0)
    plan, compute, threads = reader.plan, policy.logprob_reader.compute_batch_logprobs, set[str]()
    passes: list[object] = []

    def note_plan(*inputs: Any) -> Any:
        threads.add(threading.current_thread().name)
        planned.release()
        return plan(*inputs)

    def compute_when_next_is_planned(*inputs: Any) -> Logprobs:
        passes.append(inputs)
        if len(passes) == 1:
            assert planned.acquire(timeout=10), "the plan of this pass"
        if len(passes) < updater._total_passes:
            assert planned.acquire(timeout=10), "that of the next"
        return compute(*inputs)

    monkeypatch.setattr(reader, "plan", note_plan)
    monkeypatch.setattr(policy.logprob_reader, "compute_batch_logprobs", compute_when_next_is_planned)
    updater.train_step(example_batch(tiny_model(), groups=4))
    assert len(passes) > 2 and threads == {"plan_0"} and not planned.acquire(blocking=False)
