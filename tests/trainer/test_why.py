"""Of any token it can be said who wrote it, and why it is trained or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from tests.trainer.rollouts import bits, rollouts
from tests.trainer.told import FAILED, LEDGER, RUN, SCORED, decode, ids, policy
from trainer.ledger import Author, Entry, Ledger
from trainer.run.rollout import LEFT_OUT, Rollout
from trainer.view.credited import Credited
from trainer.view.why import because, weightless, why


def test_what_the_policy_wrote_is_trained_with_its_rewards() -> None:
    told = why(RUN, 0, 15, decode)
    assert (told.author, told.turn, told.version, told.logprob, told.trained) == (Author.POLICY, 0, 3, -0.5, True)
    assert (
        str(told)
        == """\
token 15 of rollout 0: id 109, text 'm'
  within       1 and 2.<su»m«>3##!It is 3
  written by  policy, turn 0
  sampled     under version 3, logprob -0.5
  cached      at hand for 1 of the 1 requests that begin with it
  trained     the policy wrote it, and a step that learns from it counts it with the rollout's reward 1.5 \
(call 0.5, feedback 1); its turn was answered with 0.5"""
    )


def test_what_a_tool_wrote_is_never_trained() -> None:
    told = why(RUN, 0, 20)
    assert (
        str(told)
        == """\
token 20 of rollout 0: id 33
  written by  tool add, turn 0
  cached      at hand for 0 of the 1 requests that begin with it
  not trained the tool 'add' wrote it, and only what the policy wrote is trained"""
    )


def test_what_the_task_and_feedback_wrote_is_never_trained() -> None:
    first = why(RUN, 0, 0)
    assert (first.turn, first.trained, first.requests, first.reused) == (None, False, 2, 2)
    assert "before the first turn" in str(first)
    assert first.because == "the task 'data.jsonl:1' put it there, and only what the policy wrote is trained"
    heard = Ledger((policy("x"), Entry(Author.FEEDBACK, ids("no"))))
    told = why([replace(SCORED, ledger=heard)], 0, 2)
    assert told.because == "feedback wrote it, and only what the policy wrote is trained"


def test_the_policy_is_not_trained_for_what_others_broke() -> None:
    told = why(RUN, 1, 14)
    assert not told.trained
    assert told.because.endswith("how the rollout ended: tool_failed (server 'calc' is down)")
    assert FAILED.reward is None


def test_what_was_not_scored_is_not_trained() -> None:
    told = why([replace(SCORED, rewards={}, ledger=Ledger((policy("x", version=None),)))], 0, 0)
    assert (told.trained, told.because) == (False, "the policy wrote it, but the rollout was not scored")
    assert "under an unknown version" in str(told)
    assert "it begins no later request" in str(told)


def test_what_is_quoted_cannot_paint_the_terminal() -> None:
    ledger = Ledger((Entry(Author.TOOL, ids("\x1b[2J\n\u202e"), source="\x07\n"),))
    text = str(why([replace(SCORED, ledger=ledger)], 0, 0, decode))
    assert "text '\\x1b'" in text
    assert "»\\x1b«[2J\\n\\u202e" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_a_token_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError, match="28 tokens, counted from 0, and no token 28"):
        why(RUN, 0, len(LEDGER))


@given(rollouts())
def test_nothing_is_said_to_be_trained_that_the_mask_leaves_out(rollout: Rollout) -> None:
    ledger = rollout.ledger
    scored = rollout.reward is not None and not rollout.stop.infrastructure
    for token in range(len(ledger)):
        told = why([rollout], 0, token)
        assert told.trained == (ledger.mask[token] and scored)
        assert told.id == ledger.ids[token]
        assert bits(told.logprob) == bits(ledger.logprobs[token] if ledger.mask[token] else None)
        assert str(told).count("\n") < 6


def test_a_turn_that_went_on_under_new_weights_tells_each_tokens_version() -> None:
    turn = replace(policy("xyz"), version=4, before=((3, 1),))
    run = [replace(SCORED, ledger=Ledger((Entry(Author.TASK, ids("q")), turn)))]
    assert [why(run, 0, token).version for token in range(4)] == [None, 3, 4, 4]


def test_the_reward_that_is_told_is_the_one_that_was_learned_from() -> None:
    weighed = replace(SCORED, weighed=0.25)
    assert "the rollout's reward 0.25 (call 0.5, feedback 1, weighted)" in why([weighed], 0, 15).because
    assert replace(SCORED, weighed=0.25, rewards={}).reward is None, "a number without its components is none"


def test_what_has_no_weight_has_its_own_reason_token_by_token() -> None:
    turn = replace(policy("abcdef"), info={LEFT_OUT: [[1, 3]]})
    run = [replace(SCORED, ledger=Ledger((Entry(Author.TASK, ids("q")), turn)))]
    credited = Credited((((1, 0.0, 0.0), (1, 0.5, 1.0), (2, 0.0, 0.0), (2, 0.5, 1.0), (1, 0.0, 0.0)),))
    told = [why(run, 0, token, None, credited) for token in range(1, 7)]
    assert [one.trained for one in told] == [True, False, False, True, True, False]
    assert told[1].because == "the policy wrote it, but a plug-in left it out of what is learned"
    assert told[5].because == "the policy wrote it, but `algorithm.credit.rounds` gives it no weight"
    assert "(tokens 1-2 of the turn, from 0), or" in weightless(turn, [1, 2, 5])
    assert because(run[0], turn, credit=(1, 0.0, 0.0))[0] is False


def test_what_no_step_learned_from_is_not_trained_though_it_was_scored() -> None:
    told = why(RUN, 0, 15, None, Credited(nothing="step 3 did not learn from it"))
    assert (told.trained, told.because) == (False, "the policy wrote it, but step 3 did not learn from it")
    assert why(RUN, 1, 15, None, Credited(nothing="it was dropped")).because.endswith("(server 'calc' is down)")


def test_where_the_policy_began_anew_each_ledger_is_told() -> None:
    earlier = Ledger((Entry(Author.TASK, ids("q")), policy("xy", version=1)))
    run = [replace(SCORED, earlier=(earlier,))]
    credited = Credited((((1, 0.0, 0.0), (2, 0.25, 1.0)), ((12, 0.0, 0.0), (16, 0.5, 1.0))))
    first, last = why(run, 0, 2, decode, credited, ledger=0), why(run, 0, 15, decode, credited)
    assert (first.turn, first.version, first.text, first.advantage) == (0, 1, "y", 0.25)
    assert (last.turn, last.version, last.text, last.advantage) == (1, 3, "m", 0.5)
    with pytest.raises(IndexError, match="has 2 ledgers, counted from 0, and no ledger 2"):
        why(run, 0, 0, ledger=2)


def test_behind_a_picture_each_token_has_its_own_advantage() -> None:
    wide = replace(LEDGER.entries[2], widths=(9,))
    run = [replace(SCORED, ledger=Ledger((*LEDGER.entries[:2], wide, *LEDGER.entries[3:])))]
    credited = Credited((((12, 0.0, 0.0), (5, 0.5, 1.0), (11, 0.0, 0.0), (7, 0.75, 1.0)),))
    assert [why(run, 0, token, None, credited).advantage for token in (16, 21, 27)] == [0.5, 0.75, 0.75]
