"""A lesson becomes a step: the same to the bit whenever it is repeated, and by what the policy wrote alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer.policy.made import gradient, lesson, model
from trainer.learn.aggregate import Totals
from trainer.learn.batch import Batch, pack
from trainer.learn.finite import NotFinite
from trainer.learn.lesson import Lesson
from trainer.learn.loss import loss
from trainer.learn.settings import AlgorithmSettings, CreditSettings, KLSettings
from trainer.learn.worth import rows
from trainer.policy.cut import micro, shares
from trainer.policy.errors import PolicyError
from trainer.policy.learner import Learner
from trainer.policy.policy import Policy
from trainer.policy.reader import Read
from trainer.policy.settings import CriticSettings, UpdateSettings

GRPO = AlgorithmSettings()
GAE = AlgorithmSettings(name="reinforce_pp", credit=CreditSettings(kind="gae", trust=1.0))


def learned(given: Lesson, algorithm: AlgorithmSettings = GRPO, **update: Any) -> tuple[Policy, dict[str, float]]:
    policy = Policy(model(), UpdateSettings(**update))
    return policy, Learner(policy, algorithm, exact=True, reference=Policy(model(), UpdateSettings())).learn(given)


def far(one: Policy, other: Policy) -> float:
    return max(float((value - other.weights[name]).abs().max()) for name, value in one.weights.items())


def test_a_step_makes_what_was_better_than_its_siblings_likelier() -> None:
    given = lesson(model(), rewards=(1.0, 0.0, 0.0, 1.0, 0.0, 0.0))
    policy, told = learned(given, lr=1e-2)
    batch = pack(rows(given, GRPO).rows)
    with torch.no_grad():
        moved_T = policy.read(batch.ids_T, batch.sequence_T, batch.trained_T).logprobs_T - batch.engine_T
    gained_S = batch.mean_S(moved_T, batch.trained_T)
    assert gained_S[0] > 0 and gained_S[3] > 0 and gained_S[[1, 2, 4, 5]].mean() < 0
    assert policy.steps == 1 and told["update/grad_norm"] > 0 and told["entropy"] > 0
    assert told["kl/old"] == told["clipped"] == 0.0 and told["mismatch/max"] < 1e-5
    assert told["mismatch/pass_skipped"] == 1.0


def test_micro_batches_add_up_to_the_whole_and_repeat_to_the_bit() -> None:
    given = lesson(model(), groups=3, n=4)

    def moved(tokens: int) -> Tensor:
        policy = Policy(model(), UpdateSettings(tokens=tokens))
        policy.step = lambda: {}  # type: ignore[method-assign]
        Learner(policy, GRPO, exact=True).learn(given)
        return gradient(policy.model)

    whole, parts = moved(10_000), moved(24)
    assert torch.allclose(whole, parts, atol=1e-6) and not torch.equal(whole, torch.zeros_like(whole))
    assert torch.equal(parts, moved(24))


def grown(policy: Policy, batch: Batch, targets_T: Tensor) -> Tensor:
    """The logprob of each target at its place, trained or not."""
    hidden = policy.reader.hidden(batch.ids_T, batch.sequence_T)
    logits_TV = policy.model.get_output_embeddings()(hidden.values_UD[hidden.at_T.roll(1)])  # type: ignore[no-untyped-call]
    return logits_TV.log_softmax(-1).gather(-1, targets_T[:, None])[:, 0]


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo"])
def test_no_target_that_the_policy_did_not_write_changes_the_gradient_by_a_bit(name: str) -> None:
    algorithm = AlgorithmSettings(name=name, kl=KLSettings(coefficient=0.1))  # type: ignore[arg-type]
    batch = pack(rows(lesson(model()), algorithm).rows)
    batch = replace(batch, ref_T=batch.engine_T - 0.1)
    noise_T = torch.randn(len(batch.ids_T), generator=torch.Generator().manual_seed(1))

    def spoilt(values_T: Tensor) -> Tensor:
        return torch.where(batch.mask_T, values_T, values_T + noise_T)

    def moved(batch: Batch, targets_T: Tensor) -> Tensor:
        policy = Policy(model(), UpdateSettings())
        loss(grown(policy, batch, targets_T), batch, Totals.of([batch]), algorithm).value.backward()  # type: ignore[no-untyped-call]
        return gradient(policy.model)

    clean = moved(batch, batch.ids_T)
    others = {place: spoilt(getattr(batch, place)) for place in ("engine_T", "old_T", "advantages_T", "ref_T")}
    targets_T = torch.where(batch.mask_T, batch.ids_T, (batch.ids_T + 7) % 50)
    assert not torch.equal(targets_T, batch.ids_T) and float(clean.abs().max()) > 0
    assert torch.equal(clean, moved(replace(batch, **others), targets_T))
    mine_T = torch.where(batch.mask_T, (batch.ids_T + 7) % 50, batch.ids_T)
    assert not torch.equal(clean, moved(batch, mine_T))


def test_the_learner_gathers_that_very_gradient() -> None:
    given = lesson(model())
    policy, other = Policy(model(), UpdateSettings()), Policy(model(), UpdateSettings())
    policy.step = lambda: {}  # type: ignore[method-assign]
    Learner(policy, GRPO, exact=True).learn(given)
    worth = rows(given, GRPO)
    batch = pack(worth.rows)
    loss(grown(other, batch, batch.ids_T), batch, worth.totals, GRPO).value.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(gradient(policy.model), gradient(other.model), atol=1e-5)


def test_a_lesson_that_teaches_nothing_moves_nothing_and_says_so() -> None:
    given = lesson(model(), rewards=(1.0,) * 6)
    policy, told = learned(given)
    assert policy.steps == 0 and far(policy, Policy(model(), UpdateSettings())) == 0.0
    assert told["update/rows"] == 0 and told["update/idle"] == 6


def test_several_steps_of_one_lesson_do_without_a_pass_where_the_engine_is_exact() -> None:
    given = lesson(model(), groups=3)
    policy, told = learned(given, epochs=2, minibatches=3)
    assert policy.steps == 6 and told["kl/old"] > 0
    assert told["mismatch/pass_skipped"] == 1.0 and 0 <= told["mismatch/max"] < 1e-5  # 0 where sums round alike


def test_what_was_sampled_at_a_temperature_is_learned_at_it() -> None:
    given = lesson(model(), temperature=0.7)
    told = [
        Learner(Policy(model(), UpdateSettings()), GRPO, exact=True, temperature=at).learn(given) for at in (0.7, 1)
    ]
    assert told[0]["mismatch/max"] < 1e-5 < 0.1 < told[1]["mismatch/max"]


def test_they_make_the_pass_where_it_is_not_and_measure_it_all() -> None:
    given = lesson(model(), groups=3, off=0.01)
    policy, told = learned(given, epochs=2)
    assert told["mismatch/pass_skipped"] == 0.0 and told["mismatch/mean"] == pytest.approx(0.01, rel=1e-3)
    # From the policy's own logprobs, not the engine's: a mistaken engine changes no number of the step.
    assert far(policy, learned(lesson(model(), groups=3), epochs=2)[0]) < 1e-6


def test_that_there_was_no_need_for_it_is_said_once() -> None:
    learner = Learner(Policy(model(), UpdateSettings(epochs=2, lr=1e-9)), GRPO, exact=True)
    learner.learn(lesson(model()))
    learner.learn(lesson(model()))
    (note,) = learner.notes
    assert note.startswith("the engine's logprobs are exact (") and note.endswith("no pass for the old policy's")


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_distance_to_the_reference_is_measured_and_holds_the_policy_back(place: str) -> None:
    kl = KLSettings(coefficient=50.0, estimator="k2", place=place)  # type: ignore[arg-type]
    given = lesson(model(), groups=3)
    policy = Policy(model(), UpdateSettings(lr=1e-2))
    learner = Learner(policy, AlgorithmSettings(kl=kl), exact=True, reference=Policy(model(), UpdateSettings()))
    first = learner.learn(given)
    assert first["kl/reference"] < 1e-8
    free = Learner(policy, GRPO, exact=True)
    for _ in range(3):
        free.learn(given)
    assert policy.steps == 4
    if place == "loss":
        away = learner.learn(given)["kl/reference"]
        for _ in range(5):
            near = learner.learn(given)["kl/reference"]
        assert 0 < near < away


def test_a_reference_is_read_from_the_folder_that_the_policy_came_from(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    policy = Policy.load(tmp_path, UpdateSettings(), "cpu")
    told = Learner(policy, AlgorithmSettings(kl=KLSettings(coefficient=0.1)), exact=True).learn(lesson(model()))
    assert told["kl/reference"] == 0.0
    with pytest.raises(PolicyError, match="came from none"):
        Learner(Policy(model(), UpdateSettings()), AlgorithmSettings(kl=KLSettings(coefficient=0.1)), exact=True)


def test_a_number_that_is_none_names_its_rollout_and_moves_nothing() -> None:
    given = lesson(model())
    policy = Policy(model(), UpdateSettings(tokens=10))
    clean = policy.read

    def spoilt(ids_T: Tensor, *asked: Any) -> Read:
        read = clean(ids_T, *asked)
        bad = ids_T.tolist() == list(given.drafts[-1].ids)
        return Read(read.logprobs_T * math.nan, read.entropy_T) if bad else read

    policy.read = spoilt  # type: ignore[method-assign]
    with pytest.raises(NotFinite, match=f"rollout {given.drafts[-1].name}: token"):
        Learner(policy, GRPO, exact=True).learn(replace(given, rewards=(0.0, 1.0, 0.0, 1.0, 0.0, 1.0)))
    assert far(policy, Policy(model(), UpdateSettings())) == 0.0
    assert all(value.grad is None for value in policy.model.parameters())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_names_the_setting_and_moves_nothing(error: Exception) -> None:
    policy = Policy(model(), UpdateSettings(tokens=10, chunk=4))
    passes = []

    def full(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            raise error

    policy.model.get_decoder().layers[1].register_forward_pre_hook(full)  # type: ignore[no-untyped-call, union-attr, operator]
    with pytest.raises(PolicyError, match="memory ran out in step 1") as caught:
        Learner(policy, GRPO, exact=True).learn(lesson(model()))
    assert caught.value.remedy.startswith("lower `update.tokens`")
    assert all(value.grad is None for value in policy.model.parameters()) and policy.steps == 0


def test_a_vocabulary_too_large_for_memory_names_the_chunk() -> None:
    policy = Policy(model(), UpdateSettings(chunk=10**13))
    policy.model.get_output_embeddings().register_forward_pre_hook(lambda *_: torch.empty(10**15))  # type: ignore[no-untyped-call]
    with pytest.raises(PolicyError) as caught:
        Learner(policy, GRPO, exact=True).learn(lesson(model()))
    assert caught.value.remedy.startswith("lower `update.chunk`")


def test_other_mistakes_stay_what_they_are() -> None:
    policy = Policy(model(), UpdateSettings())
    policy.model.get_decoder().register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[no-untyped-call, union-attr]
    with pytest.raises(ZeroDivisionError):
        Learner(policy, GRPO, exact=True).learn(lesson(model()))


def test_what_cannot_be_learned_from_is_refused_at_the_start() -> None:
    policy = Policy(model(), UpdateSettings())
    with pytest.raises(PolicyError, match=r"add `update.critic: \{\}`"):
        Learner(policy, GAE, exact=True)
    with pytest.raises(PolicyError, match=r"raise `sampling.temperature`"):
        Learner(policy, GRPO, exact=True, temperature=0.0)


def test_a_critic_comes_to_expect_what_comes_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    given = lesson(model(), rewards=(2.0,) * 6)
    update = UpdateSettings(critic=CriticSettings(lr=3e-2), lr=1e-4, tokens=24)

    def losses(policy: Policy, steps: int) -> list[float]:
        learner = Learner(policy, GAE, exact=True)
        return [learner.learn(given)["critic/loss"] for _ in range(steps)]

    through, broken = Policy(model(), update), Policy(model(), update)
    told = losses(through, 12)
    assert told[0] == pytest.approx(4.0) and told[-1] < 0.5
    first = losses(broken, 6)
    broken.save(tmp_path)
    again = Policy(model(), update)
    again.resume(tmp_path)
    assert first + losses(again, 6) == told
    assert far(again, through) == 0.0


def test_a_critic_whose_gradient_is_not_finite_says_so() -> None:
    policy = Policy(model(), UpdateSettings(critic=CriticSettings()))
    assert policy.critic
    policy.critic._head.grad = torch.full_like(policy.critic._head, math.nan)
    with pytest.raises(PolicyError, match="critic's gradient is not finite"):
        policy.critic.step()


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(1, 30))
def test_micro_batches_are_as_full_as_they_may_be_and_in_order(sizes: list[int], tokens: int) -> None:
    cuts = list(micro(sizes, tokens))
    assert [size for cut in cuts for size in sizes[cut]] == sizes
    assert all(sum(sizes[cut]) <= tokens or cut.stop - cut.start == 1 for cut in cuts)
    assert all(sum(sizes[cut]) + sizes[following.start] > tokens for cut, following in pairwise(cuts))


@given(st.integers(1, 20), st.integers(1, 6))
def test_shares_are_even_and_none_is_empty(count: int, parts: int) -> None:
    sizes = [share.stop - share.start for share in shares(count, parts)]
    assert sum(sizes) == count and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
