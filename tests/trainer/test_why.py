"""Tests `why`: who wrote a token, and why it is trained or not."""

from __future__ import annotations

from hypothesis import given

from tests.trainer.rollout_strategies import bitwise_key, rollouts
from tests.trainer.sample_rollouts import RUN, decode
from trainer.rollout.rollout import Rollout
from trainer.view.why import RolloutCredit, explain_token


def test_policy_token_is_trained_with_rewards() -> None:
    assert (
        str(explain_token(RUN, 0, 15, decode))
        == """\
token 15 of rollout 0: id 109, text 'm'
  within       1 and 2.<su»m«>3##!It is 3
  written by  policy, turn 0
  sampled     under version 3, logprob -0.5
  cached      for 1 of 1 later requests
  trained     the policy wrote it, and it will be trained with the rollout's reward 1.5 \
(call 0.5, feedback 1); its turn got 0.5"""
    )


def test_tool_token_is_not_trained() -> None:
    report = explain_token(RUN, 0, 20)
    assert (
        str(report)
        == """\
token 20 of rollout 0: id 33
  written by  tool add, turn 0
  cached      for 0 of 1 later requests
  not trained the tool 'add' wrote it, and only the policy's tokens are trained"""
    )


@given(rollouts())
def test_report_agrees_with_the_ledger_mask(rollout: Rollout) -> None:
    ledger = rollout.ledger
    scored = rollout.reward is not None and not rollout.stop.is_infrastructure
    for token in range(len(ledger)):
        report = explain_token([rollout], 0, token)
        assert report.trained == (ledger.mask[token] and scored)
        assert report.id == ledger.ids[token]
        assert bitwise_key(report.logprob) == bitwise_key(ledger.logprobs[token] if ledger.mask[token] else None)
        assert str(report).count("\n") < 6


def test_untrained_rollout_has_its_reason() -> None:
    report = explain_token(RUN, 0, 15, None, RolloutCredit(untrained_reason="step 3 did not learn from it"))
    assert (report.trained, report.reason) == (False, "the policy wrote it, but step 3 did not learn from it")
    assert explain_token(RUN, 1, 15, None, RolloutCredit(untrained_reason="it was dropped")).reason.endswith(
        "(server 'calc' is down)"
    )
