"""What earlier weights sampled is weighed by how likely they found it, never by what the trainer finds now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.trainer.policy.made import gradient, lesson, logprobs, model
from trainer.learn.lesson import Lesson
from trainer.learn.mismatch import measure
from trainer.learn.settings import AlgorithmSettings, MismatchSettings
from trainer.learn.worth import rows
from trainer.policy.learner import Learner
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings

GRPO = AlgorithmSettings(aggregate="token")
DECOUPLED = AlgorithmSettings(aggregate="token", ratio="proximal", mismatch=MismatchSettings(truncate="token", cap=1.1))


def aged(given: Lesson, off: float = 0.15) -> Lesson:
    """Of each rollout, the first turn was sampled by earlier weights, which found it likelier or less so by `off`."""
    drafts = []
    for place, draft in enumerate(given.drafts):
        stale = [turn == 0 for turn in draft.turns]
        sign = 1 if place % 2 else -1
        engine = [value + sign * off * flag for value, flag in zip(draft.engine, stale, strict=True)]
        drafts.append(replace(draft, stale=stale, engine=engine))
    return replace(given, drafts=tuple(drafts))


def pulled(given: Lesson, algorithm: AlgorithmSettings, **update: Any) -> tuple[Tensor, dict[str, float]]:
    policy = Policy(model(), UpdateSettings(**update))
    policy.step = lambda: {}  # type: ignore[method-assign]
    told = Learner(policy, algorithm, exact=True).learn(given)
    return gradient(policy.model), told


def slow(given: Lesson, decoupled: bool) -> Tensor:
    """The same in loops: each token's ratio to whoever is its old policy, clipped, and weighed where that is not
    the one that sampled it."""
    policy = Policy(model(), UpdateSettings())
    losses, count = [], 0.0
    for row in rows(given, GRPO).rows:
        new_T = logprobs(policy, [list(row.ids)])
        for token, weight in enumerate(row.weights):
            if not weight:
                continue
            own, engine = float(new_T[token].detach()), row.engine[token]
            old = own if decoupled or not row.stale[token] else engine
            ratio, worth = (new_T[token] - old).exp(), row.advantages[token]
            factor = min(1.1, torch.tensor(own - engine).exp().item()) if decoupled else 1.0
            losses.append(-factor * torch.minimum(ratio * worth, ratio.clamp(0.8, 1.2) * worth))
    count = rows(given, GRPO).totals.weight
    (torch.stack(losses).sum() / count).backward()  # type: ignore[no-untyped-call]
    return gradient(policy.model)


@pytest.mark.parametrize("algorithm", [GRPO, DECOUPLED], ids=["sampled", "proximal"])
def test_with_staleness_the_gradient_is_that_of_the_importance_weighted_loss(algorithm: AlgorithmSettings) -> None:
    given = aged(lesson(model(), groups=3))
    found, told = pulled(given, algorithm)
    assert torch.allclose(found, slow(given, algorithm is DECOUPLED), atol=1e-5)
    plain, _ = pulled(lesson(model(), groups=3), GRPO)
    assert not torch.allclose(found, plain, atol=1e-3)
    assert told["staleness/kl"] == pytest.approx(0.15**2 / 2, rel=0.1) and told["mismatch/max"] < 1e-5


def test_a_ratio_that_staleness_alone_took_past_the_clip_pulls_no_more() -> None:
    given = aged(lesson(model(), rewards=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)), off=-0.5)
    found, told = pulled(given, GRPO)
    assert told["clipped"] > 0 and torch.allclose(found, slow(given, False), atol=1e-5)


@pytest.mark.parametrize("fresh", [True, False])
def test_several_steps_of_one_lesson_hold_what_is_stale_against_whoever_sampled_it(fresh: bool) -> None:
    """An engine that is exact is believed of what is fresh, and there is nothing to be read where nothing is."""
    given = aged(lesson(model(), groups=3))
    if not fresh:
        given = replace(given, drafts=tuple(replace(one, stale=one.mask) for one in given.drafts))
    learner = Learner(Policy(model(), UpdateSettings(minibatches=2)), GRPO, exact=True)
    steps = [learner._micros(rows(given, GRPO), slice(0, 4))]
    (batch,), seen = [one.batch for one in learner._aged(steps)[0][0]], learner._aged(steps)[1]
    assert torch.equal(batch.old_T, batch.engine_T) and (seen is not None) == fresh
    unsure = Learner(Policy(model(), UpdateSettings(minibatches=2)), GRPO, exact=False)
    (again,) = [one.batch for one in unsure._aged(steps)[0][0]]
    assert batch.stale_T is not None and torch.equal(again.old_T[batch.stale_T], batch.engine_T[batch.stale_T])
    assert measure(again).tokens == (int(batch.fresh_T.sum()) if fresh else 0)


def test_the_proximal_policy_is_read_though_the_engine_is_exact() -> None:
    found, told = pulled(aged(lesson(model(), groups=3)), DECOUPLED, minibatches=2)
    assert told["mismatch/pass_skipped"] == 0.0 and told["mismatch/factor"] != 1.0
    assert float(found.abs().max()) > 0


def test_a_proximal_ratio_that_nothing_weighs_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"mismatch.truncate.*set it to token"):
        AlgorithmSettings(ratio="proximal")
