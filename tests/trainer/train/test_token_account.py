"""The account of a step's tokens: each is trained once or left out for a named reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.trainer.algorithms.scored_groups import group, scored
from trainer.algorithms.advantages import compute_token_advantages
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.token_weights import weigh_all_turns
from trainer.algorithms.train_batch import build_train_batch
from trainer.reward.scorer import ScoredGroup, UnscoredRollout
from trainer.rollout.rollout import Rollout, StopReason
from trainer.train.collect import StepRollouts, TokenAccount, account_for_tokens


def pair(name: str, *rewards: float) -> ScoredGroup:
    """A group of rollouts of 10 and 11 sampled tokens."""
    lengths = enumerate(rewards, 10)
    return group(*(scored("q" + "a" * count, reward, index=count, group=name) for count, reward in lengths))


def members(*groups: ScoredGroup) -> list[Rollout]:
    return [one.rollout for group in groups for one in (*group.scored, *group.failed)]


def account(step: StepRollouts, times: int = 1) -> TokenAccount:
    """As the training loop does it, where each row is trained once."""
    batch = build_train_batch(step.groups, AlgorithmSettings(), weigh_all_turns)
    advantages = compute_token_advantages(batch, AlgorithmSettings())
    return account_for_tokens(step, [*advantages.all_rows] * times, [*advantages.rows] * times)


def test_each_reason_for_leaving_tokens_out_has_its_count() -> None:
    taught, equal = pair("1-0-0", 1.0, 0.0), pair("1-0-1", 1.0, 1.0)
    replaced, stale = pair("1-0-2", 0.0, 0.0), pair("1-0-3", 1.0, 0.0)
    failed = replace(taught, failed=(UnscoredRollout(scored("qaaaaa", group="1-0-0").rollout, "why"),))
    lost = replace(scored("qaaa", group="1-0-0").rollout, stop=StopReason.TOOL_FAILED)
    dropped = scored("qaaaa", group="1-0-4").rollout
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
    first = scored("q" + "a" * 20, 1.0)
    played = group(replace(first, rollout=replace(first.rollout, infos=infos)), scored("q" + "a" * 10, index=1))
    step = StepRollouts(groups=[played], finished=members(played))
    assert account(step).left_out == Counter(discarded=5)
    infos["agent"]["discarded"] = 0
    with pytest.raises(AssertionError, match="35 tokens were sampled, but 30 were trained and 0 left out"):
        account(step)


def test_row_that_is_trained_twice_is_an_error() -> None:
    taught = pair("1-0-0", 1.0, 0.0)
    with pytest.raises(AssertionError, match="remedy"):
        account(StepRollouts(groups=[taught], finished=members(taught)), times=2)
