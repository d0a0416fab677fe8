"""Tests optimizer steps, the learning rate schedule, and saving and resuming a policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.policy.tiny_policies import pack_sequences, policy_logprobs, tiny_model
from trainer.policy.optimizers import LR_RATIO, learning_rate_factor
from trainer.policy.policy import Policy
from trainer.policy.settings import CriticSettings, PolicyError, UpdateSettings

ROWS = [[1, 2, 3, 4], [7, 8, 9]]


def train_steps(policy: Policy, steps: int) -> Policy:
    for _ in range(steps):
        (-policy_logprobs(policy, ROWS).sum()).backward()
        policy.step()
    return policy


def test_an_optimizer_that_is_handed_in_may_have_weights_with_multiples_of_the_rate() -> None:
    def make_sgd(weights: Mapping[str, torch.Tensor], settings: UpdateSettings) -> torch.optim.Optimizer:
        first, *others = weights.values()
        groups: list[dict[str, Any]] = [{"params": [first], LR_RATIO: 4.0}, {"params": others}]
        return torch.optim.SGD(groups, lr=settings.rate)

    policy = Policy(tiny_model(), UpdateSettings(lr=0.1, warmup_steps=2, max_grad_norm=1e6), make_optimizer=make_sgd)
    before = {name: value.clone() for name, value in policy.weights.items()}
    for _, value in policy.model.named_parameters():
        value.grad = torch.ones_like(value)
    metrics = policy.step()
    assert metrics["update/lr"] == 0.05
    changes = [float((before[name] - value.detach()).mean()) for name, value in policy.model.named_parameters()]
    assert changes == pytest.approx([0.2, *[0.05] * (len(changes) - 1)], rel=1e-3)


def test_gradient_that_is_not_finite_changes_nothing_and_raises() -> None:
    policy = Policy(tiny_model(), UpdateSettings())
    before = {name: value.clone() for name, value in policy.weights.items()}
    (policy_logprobs(policy, ROWS).sum() * float("nan")).backward()
    with pytest.raises(PolicyError, match=r"not finite[^\n]*\n  remedy: lower `update.lr`"):
        policy.step()
    assert policy.steps == 0
    assert all(torch.equal(before[name], value) for name, value in policy.weights.items())


def test_cosine_decay_equals_linear_decay_at_the_ends_and_halfway() -> None:
    line, curve = (
        UpdateSettings(warmup_steps=4, decay_steps=14, min_lr_ratio=0.2, lr_scheduler=fall)
        for fall in ("linear", "cosine")
    )
    for step in (0, 3, 4, 9, 14, 30):
        assert learning_rate_factor(step, curve) == pytest.approx(learning_rate_factor(step, line))
    assert learning_rate_factor(6, curve) > learning_rate_factor(6, line) and learning_rate_factor(
        12, curve
    ) < learning_rate_factor(12, line)
    assert learning_rate_factor(6, curve) == pytest.approx(0.2 + 0.8 * 0.9045084971874737)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize(
    "damage", [truncate, Path.unlink, lambda file: file.write_bytes(b"")], ids=["truncated", "missing", "empty"]
)
def test_damaged_checkpoint_file_is_named_with_a_remedy(tmp_path: Path, name: str, damage) -> None:  # type: ignore[no-untyped-def]
    policy = train_steps(Policy(tiny_model(), UpdateSettings()), 1)
    policy.save(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(PolicyError) as caught:
        Policy(tiny_model(), UpdateSettings()).resume(tmp_path)
    assert str(tmp_path / name) in caught.value.problem and "complete checkpoint" in caught.value.remedy


HALF = UpdateSettings(dtype="bfloat16", lr=1e-4, warmup_steps=0)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}


def test_bfloat16_policy_is_close_and_engines_get_what_it_computes_with() -> None:
    half, exact = Policy(tiny_model(), HALF), Policy(tiny_model(), UpdateSettings())
    difference = (policy_logprobs(half, ROWS) - policy_logprobs(exact, ROWS)).abs().max()
    assert 0 < difference < 0.5
    assert {value.dtype for value in half.weights.values()} == {torch.bfloat16}
    assert all(torch.equal(value.bfloat16(), half.weights[name]) for name, value in exact.weights.items())


def test_updates_that_bfloat16_cannot_hold_add_up_in_the_master_weights(tmp_path: Path) -> None:
    policy = train_steps(Policy(tiny_model(), HALF), 3)
    policy.save(tmp_path)
    saved, name = read_weights(tmp_path), "model.norm.weight"
    assert load_file(tmp_path / "model.safetensors")[name].dtype == torch.float32
    assert torch.equal(policy.weights[name], torch.ones(16).bfloat16()), "near 1, bfloat16 steps are of 0.008"
    assert (saved[name] - 1).abs().max() == pytest.approx(3e-4, rel=0.1)
    assert all(torch.equal(saved[name].bfloat16(), value) for name, value in policy.weights.items())


def test_share_of_bfloat16_weights_that_a_step_changes_is_measured() -> None:
    policy = Policy(tiny_model(), HALF)
    before = {name: value.clone() for name, value in policy.weights.items()}
    (-policy_logprobs(policy, ROWS).sum()).backward()
    share = policy.step()["update/changed"]
    changed = sum(int((value != before[name]).sum()) for name, value in policy.weights.items())
    assert share == changed / sum(value.numel() for value in before.values()) and 0 < share < 0.5
    assert "update/changed" not in Policy(tiny_model(), UpdateSettings()).step(), "float32 weights all change"


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    policy = Policy(tiny_model(), HALF)
    for _ in range(400):  # In bfloat16, sums stop at 256 times what is added.
        (-policy_logprobs(policy, ROWS).sum()).backward()
    norm = policy.step()["update/grad_norm"]
    single = Policy(tiny_model(), HALF)
    (-policy_logprobs(single, ROWS).sum()).backward()
    assert norm == pytest.approx(400 * single.step()["update/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "update",
    [
        UpdateSettings(lr_scheduler="linear", decay_steps=10),
        HALF.model_copy(update={"critic": CriticSettings()}),
        HALF.model_copy(update={"gradient_checkpointing": True}),
    ],
)
def test_resumed_policy_gets_identical_weights(tmp_path: Path, update: UpdateSettings) -> None:
    uninterrupted = train_steps(Policy(tiny_model(), update), 4)
    train_steps(Policy(tiny_model(), update), 2).save(tmp_path / "half-way")
    resumed = Policy(tiny_model(), update)
    resumed.resume(tmp_path / "half-way")
    train_steps(resumed, 2)
    assert resumed.steps == 4
    for name, policy in (("first", uninterrupted), ("second", resumed)):
        policy.save(tmp_path / name)
    first, second = read_weights(tmp_path / "first"), read_weights(tmp_path / "second")
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert all(torch.equal(value, resumed.weights[name]) for name, value in uninterrupted.weights.items())


def test_reference_of_a_bfloat16_policy_is_what_it_was(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    policy = Policy.load(tmp_path, HALF, "cpu")
    before = policy_logprobs(policy, ROWS)
    train_steps(policy, 5)
    reference = policy.load_reference().compute_batch_logprobs(pack_sequences(ROWS)).logprobs_T
    assert torch.equal(reference, before)
