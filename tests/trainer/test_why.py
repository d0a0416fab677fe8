"""Tests `why`: who wrote a token, and why it is trained or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from tests.trainer.rollout_strategies import bitwise_key, rollouts
from tests.trainer.sample_rollouts import FAILED, LEDGER, RUN, SCORED, decode, policy, text_to_ids
from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import EXCLUDED_SPANS, Rollout
from trainer.view.why import RolloutCredit, explain_token, explain_training, explain_zero_weight


def test_policy_token_is_trained_with_rewards() -> None:
    report = explain_token(RUN, 0, 15, decode)
    assert (report.author, report.turn, report.version, report.logprob, report.trained) == (
        Author.POLICY,
        0,
        3,
        -0.5,
        True,
    )
    assert (
        str(report)
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


def test_task_and_feedback_tokens_are_not_trained() -> None:
    first = explain_token(RUN, 0, 0)
    assert (first.turn, first.trained, first.requests, first.reused) == (None, False, 2, 2)
    assert "before the first turn" in str(first)
    assert first.reason == "it is from the task 'data.jsonl:1', and only the policy's tokens are trained"
    ledger = Ledger((policy("x"), Entry(Author.FEEDBACK, text_to_ids("no"))))
    report = explain_token([replace(SCORED, ledger=ledger)], 0, 2)
    assert report.reason == "feedback wrote it, and only the policy's tokens are trained"


def test_infrastructure_failure_is_not_trained() -> None:
    report = explain_token(RUN, 1, 14)
    assert not report.trained
    assert report.reason.endswith("an infrastructure failure ended the rollout: tool_failed (server 'calc' is down)")
    assert FAILED.reward is None


def test_unscored_rollout_is_not_trained() -> None:
    report = explain_token([replace(SCORED, rewards={}, ledger=Ledger((policy("x", version=None),)))], 0, 0)
    assert (report.trained, report.reason) == (False, "the policy wrote it, but the rollout was not scored")
    assert "under an unknown version" in str(report)
    assert "no later request has it in its prompt" in str(report)


def test_quoted_text_is_escaped() -> None:
    ledger = Ledger((Entry(Author.TOOL, text_to_ids("\x1b[2J\n\u202e"), source="\x07\n"),))
    text = str(explain_token([replace(SCORED, ledger=ledger)], 0, 0, decode))
    assert "text '\\x1b'" in text
    assert "»\\x1b«[2J\\n\\u202e" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_missing_token_raises_index_error() -> None:
    with pytest.raises(IndexError, match="no token 28: the ledger has 28 tokens, counted from 0"):
        explain_token(RUN, 0, len(LEDGER))


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


def test_each_token_has_its_own_version() -> None:
    turn = replace(policy("xyz"), version=4, earlier_versions=((3, 1),))
    run = [replace(SCORED, ledger=Ledger((Entry(Author.TASK, text_to_ids("q")), turn)))]
    assert [explain_token(run, 0, token).version for token in range(4)] == [None, 3, 4, 4]


def test_reported_reward_is_the_weighted_one() -> None:
    weighted = replace(SCORED, weighted_reward=0.25)
    assert "the rollout's reward 0.25 (call 0.5, feedback 1, weighted)" in explain_token([weighted], 0, 15).reason
    assert replace(SCORED, weighted_reward=0.25, rewards={}).reward is None, "a number without its components is none"


def test_zero_weight_tokens_have_their_own_reason() -> None:
    turn = replace(policy("abcdef"), info={EXCLUDED_SPANS: [[1, 3]]})
    run = [replace(SCORED, ledger=Ledger((Entry(Author.TASK, text_to_ids("q")), turn)))]
    credited = RolloutCredit((((1, 0.0, 0.0), (1, 0.5, 1.0), (2, 0.0, 0.0), (2, 0.5, 1.0), (1, 0.0, 0.0)),))
    report = [explain_token(run, 0, token, None, credited) for token in range(1, 7)]
    assert [report.trained for report in report] == [True, False, False, True, True, False]
    assert report[1].reason == "the policy wrote it, but a plug-in excluded it from training"
    assert report[5].reason == "the policy wrote it, but `algorithm.credit.rounds` gives it no weight"
    assert "(tokens 1-2 of the turn, from 0), or" in explain_zero_weight(turn, [1, 2, 5])
    assert explain_training(run[0], turn, credit=(1, 0.0, 0.0))[0] is False


def test_untrained_rollout_has_its_reason() -> None:
    report = explain_token(RUN, 0, 15, None, RolloutCredit(untrained_reason="step 3 did not learn from it"))
    assert (report.trained, report.reason) == (False, "the policy wrote it, but step 3 did not learn from it")
    assert explain_token(RUN, 1, 15, None, RolloutCredit(untrained_reason="it was dropped")).reason.endswith(
        "(server 'calc' is down)"
    )


def test_each_ledger_is_reported() -> None:
    earlier = Ledger((Entry(Author.TASK, text_to_ids("q")), policy("xy", version=1)))
    run = [replace(SCORED, earlier=(earlier,))]
    credited = RolloutCredit((((1, 0.0, 0.0), (2, 0.25, 1.0)), ((12, 0.0, 0.0), (16, 0.5, 1.0))))
    first, last = explain_token(run, 0, 2, decode, credited, ledger=0), explain_token(run, 0, 15, decode, credited)
    assert (first.turn, first.version, first.text, first.advantage) == (0, 1, "y", 0.25)
    assert (last.turn, last.version, last.text, last.advantage) == (1, 3, "m", 0.5)
    with pytest.raises(IndexError, match="has 2 ledgers, counted from 0: there is no ledger 2"):
        explain_token(run, 0, 0, ledger=2)


def test_tokens_after_an_image_have_their_own_advantage() -> None:
    expanded_entry = replace(LEDGER.entries[2], widths=(9,))
    run = [replace(SCORED, ledger=Ledger((*LEDGER.entries[:2], expanded_entry, *LEDGER.entries[3:])))]
    credited = RolloutCredit((((12, 0.0, 0.0), (5, 0.5, 1.0), (11, 0.0, 0.0), (7, 0.75, 1.0)),))
    assert [explain_token(run, 0, token, None, credited).advantage for token in (16, 21, 27)] == [0.5, 0.75, 0.75]
