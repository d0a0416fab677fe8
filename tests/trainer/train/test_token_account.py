"""The account of a step's tokens: each is trained once or left out for a named reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from trainer.algorithms.advantages import compute_token_advantages
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.train_batch import build_train_batch
from trainer.ledger import Author, Entry, Ledger
from trainer.reward.scorer import ScoredGroup, ScoredRollout, UnscoredRollout
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.task import Task
from trainer.train.collect import StepRollouts, TokenAccount, account_for_tokens

TASK = Task("t", ())
SETTINGS = AlgorithmSettings()


def policy(count: int, **info: Any) -> Entry:
    return Entry(Author.POLICY, (7,) * count, logprobs=(-1.0,) * count, version=0, finish_reason="stop", info=info)


def rollout(group: str, index: int, *turns: Entry, stop: StopReason = StopReason.DONE, **more: Any) -> Rollout:
    entries = [entry for turn in turns for entry in (Entry(Author.TASK, (1, 2)), turn)]
    return Rollout("t", Ledger(tuple(entries)), stop, group, index, **more)


def group(name: str, *rewards: float) -> ScoredGroup:
    rollouts = [rollout(name, index, policy(10 + index)) for index in range(len(rewards))]
    return scored(rollouts, rewards)


def scored(rollouts: list[Rollout], rewards: tuple[float, ...]) -> ScoredGroup:
    pairs = zip(rollouts, rewards, strict=True)
    return ScoredGroup(
        TASK, tuple(ScoredRollout(one, {}, reward, (0.0,) * len(one.turns), True) for one, reward in pairs)
    )


def members(*groups: ScoredGroup) -> list[Rollout]:
    return [one.rollout for group in groups for one in (*group.scored, *group.failed)]


def account(step: StepRollouts, weights: Any = None) -> TokenAccount:
    """As the training loop does it."""
    batch = build_train_batch(step.groups, SETTINGS, weights or (lambda ledger: tuple(map(float, ledger.mask))), 0)
    advantages = compute_token_advantages(batch, SETTINGS)
    return account_for_tokens(step, advantages.all_rows, advantages.rows)


def test_each_reason_for_leaving_tokens_out_has_its_count() -> None:
    taught, equal = group("1-0-0", 1.0, 0.0), group("1-0-1", 1.0, 1.0)
    replaced, stale = group("1-0-2", 0.0, 0.0), group("1-0-3", 1.0, 0.0)
    failed = replace(taught, failed=(UnscoredRollout(rollout("1-0-0", 2, policy(5)), "why"),))
    lost = rollout("1-0-0", 2, policy(3), stop=StopReason.TOOL_FAILED)
    dropped = rollout("1-0-4", 0, policy(4))
    step = StepRollouts(groups=[failed, equal], replaced=[replaced], dropped=[stale])
    step.finished = [*members(failed, equal, replaced, stale), lost, dropped]
    result = account(step)
    assert result.left_out == Counter(
        infrastructure=3, dropped_group=4, unscored=5, replaced=21, stale=21, no_gradient=21
    )
    assert (result.trained, result.sampled) == (21, 96)
    assert result.metrics["tokens/left_out/stale"] == 21


def test_turn_that_an_agents_engine_sampled_but_nobody_recorded_is_named_or_an_error() -> None:
    infos = {"agent": {"sampled": 25, "discarded": 5}}
    rollouts = [rollout("1-0-0", 0, policy(20), infos=infos), rollout("1-0-0", 1, policy(10))]
    step = StepRollouts(groups=[scored(rollouts, (1.0, 0.0))], finished=rollouts)
    assert account(step).left_out == Counter(discarded=5)
    infos["agent"]["discarded"] = 0
    with pytest.raises(AssertionError, match="35 tokens were sampled, but 30 were trained and 0 left out"):
        account(step)


def test_row_that_is_trained_twice_is_an_error() -> None:
    taught = group("1-0-0", 1.0, 0.0)
    step = StepRollouts(groups=[taught], finished=members(taught))
    batch = build_train_batch(step.groups, SETTINGS, lambda ledger: tuple(map(float, ledger.mask)), 0)
    rows = compute_token_advantages(batch, SETTINGS).rows
    with pytest.raises(AssertionError, match="remedy"):
        account_for_tokens(step, [*rows, *rows], [*rows, *rows])
