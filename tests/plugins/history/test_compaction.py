"""Rollouts that are longer than their context: what is kept, what is trained, and what each limit does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.errors import ConfigError
from mtrl_plugins.history.compaction import EMPTY_SUMMARY, POSTPONED, Compaction
from mtrl_plugins.history.settings import HistorySettings
from mtrl_plugins.trl.reward_functions import reward_arguments as trl_arguments
from mtrl_plugins.verl.reward_function import score_arguments
from tests.plugins.history.long_chats import (
    REQUEST,
    TASK,
    TEMPLATE,
    gradient_factors,
    join_ledgers,
    play,
    read_pages,
    sampled_turns,
    texts,
)
from tests.trainer.policy_scripts import encode_turns, render_calls
from trainer.data.traces import WEIGHT, _task_from_ledger
from trainer.engine.base import EngineError
from trainer.ledger import BRANCH, Author, Ledger, Message
from trainer.reward.attempt import Attempt
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.settings import RolloutSettings
from trainer.rollout.steppers import RolloutEnd, Step, ThinkAgain, ToolsAndFeedback, Turn
from trainer.rollout.task import Task
from trainer.rollout.trace_player import encode_trace
from trainer.setup import make_stepper
from trainer.view.branches import name_branches
from trainer.view.why import explain_token

PAGES = [40] * 12


def halve(messages: Sequence[Message]) -> list[Message]:
    """A user's own way: the task, and one line about the rest."""
    said = {"role": "assistant", "content": f"I read {len(messages)}."}
    return [*messages[:2], said, {"role": "user", "content": "Go on."}]


KINDS: dict[str, dict[str, Any]] = {
    "summarise": {},
    "window": {"kind": "window"},
    "function": {"kind": f"{__name__}:halve"},
}


async def test_policy_goes_on_from_the_task_and_its_own_summary() -> None:
    rollout, engine = await play(read_pages(PAGES, summary="Pages 0 to 3: nothing."))
    assert rollout.stop is StopReason.DONE and len(rollout.ledgers) == 3
    first, second = texts(rollout, 0), texts(rollout, 1)
    assert first[-2][0] == "tool" and REQUEST in first[-2][1]
    assert first[-1][0] == "policy" and "Pages 0 to 3" in first[-1][1]
    assert "Read all pages.\n\nYour summary of what was done so far:\nPages 0 to 3" in second[0][1]
    assert "page 0:" not in second[0][1] and rollout.ledger.entries[0].source == "after summary 2"
    written = sum(turn.ids == rollout.ledgers[0].turns[-1].ids for turn in rollout.turns)
    assert rollout.infos["history"] == {
        "compactions": 2,
        "summaries": 2,
        "summary_tokens": written * len(rollout.ledgers[0].turns[-1].ids),
        "empty_summaries": 0,
        "ignored_calls": 0,
    }
    assert name_branches(rollout) == ("the task's chat", "after summary 1", "after summary 2")
    prompt = explain_token([rollout], 0, len(rollout.ledger.entries[0].ids) - 1)
    assert not prompt.trained and "after summary 2" in prompt.reason
    assert len(engine.requests) == len(rollout.turns)


async def test_answer_that_leaves_no_room_for_the_summary_follows_it() -> None:
    rollout, _ = await play(read_pages([30, 30, 330], summary="Two pages."))
    assert rollout.stop is StopReason.DONE and len(rollout.ledgers) == 2
    (_, note), (_, summary) = texts(rollout, 0)[-2:]
    assert POSTPONED in note and REQUEST in note and "page 2" not in note and "Two pages." in summary
    call, answer, last = rollout.ledger.entries[1:]
    assert call.ids == rollout.ledgers[0].turns[-2].ids, "the call stands there with the ids that were sampled"
    assert (call.author, call.source) == (Author.TASK, BRANCH) and not call.calls
    assert (answer.author, last.author) == (Author.TOOL, Author.POLICY) and "page 2" in str(answer.messages)
    assert Attempt(None, rollout).given(Author.TOOL) == (0.0, 1.0, 2.0, 0.0, 0.0), "the call's reward, once"  # type: ignore[arg-type]
    assert rollout.infos.get("drift") is None and rollout.rewards == {"call": 3.0}


async def test_window_keeps_the_latest_turns_with_their_ids_and_no_summary() -> None:
    rollout, _ = await play(read_pages(PAGES), kind="window", at=0.9)
    assert rollout.stop is StopReason.DONE and rollout.infos.get("drift") is None
    first, second = rollout.ledgers[:2]
    assert second.entries[0].ids == first.entries[0].ids, "the opening is the same, for the prefix cache"
    kept = [entry for entry in second.entries[1:] if entry.author is Author.TASK]
    assert [entry.ids for entry in kept] == [entry.ids for entry in first.entries[-len(kept) :]]
    assert [entry.source for entry in kept] == [BRANCH, "read", BRANCH] and kept[0].messages
    turns = [call.arguments for turn in rollout.turns for call in turn.calls]
    assert len(turns) == len({*turns}) == len(PAGES), "kept calls are not counted again"
    token = second.starts[1]
    report = explain_token([rollout], 0, token, ledger=1)
    assert not report.trained and "another branch" in report.reason


@given(
    kind=st.sampled_from([*KINDS]),
    words=st.lists(st.integers(0, 500), max_size=12),
    at=st.floats(0.2, 0.79),
    summary=st.sampled_from(["", "Short.", "long " * 20, render_calls(("read", {"page": 0, "words": 1}))]),
)
@hypothesis(max_examples=40, deadline=None)
def test_each_sampled_id_stands_once_behind_the_ids_that_the_engine_read(
    kind: str, words: list[int], at: float, summary: str
) -> None:
    rollout, engine = anyio.run(partial(play, read_pages(words, summary), at=at, turn_tokens=50, **KINDS[kind]))
    assert not rollout.stop.is_infrastructure, rollout.reason
    requests = [request.ids for request in engine.requests]
    assert [before for before, _ in sampled_turns(rollout)] == requests
    assert all(len(ledger) <= 1200 for ledger in rollout.ledgers if ledger.turns)
    for request, (before, ids), index in zip(requests, sampled_turns(rollout), range(len(requests)), strict=True):
        again = rollout.ledgers[_ledger_of(rollout, index)]
        assert again.ids[len(before) : len(before) + len(ids)] == ids and len(request) < 1200


def _ledger_of(rollout: Rollout, turn: int) -> int:
    ends = [sum(len(ledger.turns) for ledger in rollout.ledgers[: index + 1]) for index in range(len(rollout.ledgers))]
    return next(index for index, end in enumerate(ends) if turn < end)


@pytest.mark.parametrize("aggregate", ["sequence", "token", 7])
@pytest.mark.parametrize("kind", [*KINDS])
async def test_tokens_count_as_if_the_rollout_were_in_one_ledger(kind: str, aggregate: str | int) -> None:
    cut = [(await play(read_pages(PAGES[:count]), **KINDS[kind]))[0] for count in (12, 2)]
    assert [len(rollout.ledgers) > 1 for rollout in cut] == [True, False]
    whole = list(map(join_ledgers, cut))
    factors = [gradient_factors(rollouts, aggregate) for rollouts in (cut, whole)]
    tokens = sum(len(turn.ids) for rollout in cut for turn in rollout.turns)
    assert len(factors[0]) == tokens and factors[0] == pytest.approx(factors[1], rel=1e-5)


async def test_call_in_a_summary_is_not_made_and_counts_for_no_limit() -> None:
    call = render_calls(("read", {"page": 77, "words": 1}))
    rollout, _ = await play(read_pages(PAGES[:8], summary=f"So far nothing.\n{call}"))
    assert rollout.stop is StopReason.DONE and rollout.infos["history"]["ignored_calls"] == 1
    assert "page 77" not in "".join(text for index in range(2) for _, text in texts(rollout, index))
    summary = rollout.ledgers[0].turns[-1]
    assert not summary.calls and TEMPLATE.tokenizer.decode(summary.ids).count("77") == 1, "the ids are as sampled"
    assert "So far nothing." in texts(rollout, 1)[0][1] and "77" not in texts(rollout, 1)[0][1]


async def test_empty_summary_is_told_and_counted() -> None:
    rollout, _ = await play(read_pages(PAGES[:8], summary=""))
    assert rollout.stop is StopReason.DONE and rollout.infos["history"]["empty_summaries"] == 1
    assert EMPTY_SUMMARY in texts(rollout, 1)[0][1]


async def test_summary_that_is_too_long_ends_the_rollout_as_any_turn_does() -> None:
    rollout, _ = await play(read_pages(PAGES, summary="word " * 100))
    assert rollout.stop is StopReason.LENGTH_TURN and not rollout.stop.is_infrastructure
    assert len(rollout.ledger.turns[-1].ids) == 60 and rollout.rewards


@pytest.mark.parametrize("kind", [*KINDS])
async def test_number_of_compactions_is_limited(kind: str) -> None:
    rollout, _ = await play(read_pages([40] * 40), times=2, **KINDS[kind])
    assert rollout.stop is StopReason.LENGTH_ROLLOUT and rollout.infos["history"]["compactions"] == 2
    assert len(rollout.ledgers) == 3


async def test_rollout_that_fits_is_left_as_it_is() -> None:
    rollout, _ = await play(read_pages([5, 5]))
    assert rollout.stop is StopReason.DONE and not rollout.earlier and rollout.infos["history"] == {}
    assert name_branches(rollout) == ()


async def test_engine_that_fails_in_a_summary_is_not_the_policys_failure() -> None:
    write = read_pages(PAGES)

    def fail(ids: Any, sampling: Any, key: str) -> Any:
        asked = REQUEST in TEMPLATE.tokenizer.decode(ids)
        return EngineError("the server is gone") if asked else write(ids, sampling, key)

    rollout, _ = await play(fail)
    assert rollout.stop is StopReason.ENGINE_FAILED and not rollout.rewards


def raise_error(messages: Sequence[Message]) -> list[Message]:
    raise RuntimeError("no idea")


def return_text(messages: Sequence[Message]) -> str:
    return "a summary"


@pytest.mark.parametrize(("name", "words"), [("raise_error", "no idea"), ("return_text", "'a summary', not a list")])
async def test_function_that_fails_is_not_the_policys_failure(name: str, words: str) -> None:
    rollout, _ = await play(read_pages(PAGES), kind=f"{__name__}:{name}")
    assert rollout.stop is StopReason.ERROR and words in rollout.reason and not rollout.rewards


class ExcludeCalls(ToolsAndFeedback):
    """Excludes the first two ids of each turn that it saw."""

    def __init__(self) -> None:
        self.seen = 0

    async def step(self, turn: Turn) -> Any:
        self.seen += 1
        return await super().step(turn)

    async def finish(self, turn: Turn | None, stop: StopReason) -> RolloutEnd:
        return RolloutEnd({"mine": 1}, [((0, 2),)] * (self.seen + 1))


async def test_spans_of_the_wrapped_stepper_stay_at_its_own_turns() -> None:
    rollout, _ = await play(read_pages(PAGES[:8]), stepper=ExcludeCalls())
    excluded = [bool(turn.info.get("left_out")) for turn in rollout.turns]
    assert rollout.infos["mine"] == 1 and excluded.count(False) == 1
    assert not rollout.ledgers[0].turns[-1].info.get("left_out"), "the summary is none of its turns"


def spoil(messages: list[Any]) -> list[Any]:
    for message in messages:
        message["content"] = "GONE"
    return messages[:2]


async def test_function_that_edits_what_it_gets_changes_neither_the_task_nor_a_ledger() -> None:
    rollout, _ = await play(read_pages(PAGES), kind=f"{__name__}:spoil")
    assert len(rollout.ledgers) > 1 and "GONE" in str(rollout.ledgers[1].messages[:2])
    assert "GONE" not in str(rollout.ledgers[0].messages) and "GONE" not in str(TASK.messages)


async def test_summaries_use_up_no_turn_of_the_policy() -> None:
    limited, _ = await play(read_pages(PAGES), assistant_turns=7)
    assert limited.stop is StopReason.ASSISTANT_TURNS and limited.infos["history"]["summaries"] == 1
    assert len(limited.turns) == 8, "seven turns, and a summary"


async def test_summaries_leave_the_count_of_invalid_turns_as_it_is() -> None:
    wrong = render_calls(("read", {"page": "x" * 9, "words": "y" * 9}))
    write = read_pages([], summary="So far nothing.", last=wrong)
    rollout, _ = await play(write, at=0.3, rollout_tokens=900, turn_tokens=100, invalid_turns=5)
    assert rollout.stop is StopReason.INVALID_CALLS and rollout.infos["history"]["summaries"] > 0
    assert len(rollout.turns) == 5 + rollout.infos["history"]["summaries"]


@pytest.mark.parametrize("context_length", [None, 500])
async def test_summary_fits_where_another_limit_than_the_rollouts_binds(context_length: int | None) -> None:
    limits = {"response_tokens": 300} if context_length is None else {}
    pages = read_pages([20] * 6, summary="fact " * 8)
    rollout, _ = await play(pages, at=0.95, context_length=context_length, **limits)
    assert rollout.stop is StopReason.DONE and rollout.infos["history"]["summaries"] > 0


@pytest.mark.parametrize("kind", [*KINDS])
async def test_rewards_see_each_turn_and_answer_once(kind: str) -> None:
    rollout, _ = await play(read_pages(PAGES), **KINDS[kind])
    attempt = Attempt(TASK, rollout, decoder=TEMPLATE)
    assert len(rollout.ledgers) > 1
    for page in range(len(PAGES)):
        assert attempt.response.count(f"page {page}:") == attempt.response.count(f'"page": {page},') == 1
    assert sum(attempt.response_ids[1]) == sum(len(turn.ids) for turn in rollout.turns)
    (completion,) = trl_arguments([attempt], ())["completions"]
    called = [call["function"]["arguments"]["page"] for turn in completion for call in turn.get("tool_calls", ())]
    assert called == [*range(len(PAGES))] and str(completion).count("page 0: word") == 1
    assert completion[-1] == {"role": "assistant", "content": "All read."} and completion[0] not in TASK.messages
    trajectory = attempt.trajectory
    assert len(trajectory["turns"]) == len(trajectory["per_turn_rewards"])
    rewards = zip(trajectory["turns"], trajectory["per_turn_rewards"], strict=True)
    paid = [reward for turn, reward in rewards if turn["role"] == "assistant" and turn.get("tool_calls")]
    assert paid == [float(page) for page in range(len(PAGES))] and sum(paid) == trajectory["reward"]
    summaries = rollout.infos["history"].get("summaries", 0)
    turns = 1 + len(rollout.turns) + len(PAGES)
    assert score_arguments(attempt)["extra_info"]["num_turns"] == turns and len(rollout.turns) == 13 + summaries


def is_never_right(answer: str, task: Task) -> bool:
    return False


@pytest.mark.parametrize("kind", [*KINDS])
async def test_tries_are_counted_over_all_ledgers(kind: str) -> None:
    stepper = ThinkAgain(is_never_right, "Wrong, " + "again " * 40, tries=6)
    rollouts = [
        (await play(read_pages([]), stepper=stepper, rollout_tokens=600, at=0.5, **KINDS[kind]))[0] for _ in "ab"
    ]
    for rollout in rollouts:
        summaries = rollout.infos["history"].get("summaries", 0)
        assert len(rollout.turns) - summaries == 6, "each rollout counts for itself"
        assert len(rollout.ledgers) > 1


@pytest.mark.parametrize("kind", [*KINDS])
async def test_trace_of_a_shortened_rollout_trains_each_turn_once_with_its_own_ids(kind: str) -> None:
    numbers = iter(range(99))

    def write(ids: Sequence[int], sampling: Any, key: str) -> Any:
        return encode_turns(TEMPLATE, f"Answer {next(numbers)}.")[0]

    rollout, _ = await play(write, stepper=Chat(), rollout_tokens=800, **KINDS[kind])
    assert rollout.stop is StopReason.STEP_DONE and len(rollout.ledgers) > 1
    trained = []
    for ledger in rollout.ledgers:
        task, _, template, turns = encode_trace(_task_from_ledger(rollout, ledger, "rollouts:1"), TEMPLATE, ())
        assert [template.parse_turn(ids).content for ids in turns] == [turn["content"] for turn in task.turns]
        trained += [ids for ids, turn in zip(turns, task.turns, strict=True) if turn.get(WEIGHT, 1)]
    assert trained == [turn.ids for turn in rollout.turns]


class Chat(ToolsAndFeedback):
    """Asks for more, twelve times."""

    def check_finished(self, turn: Turn) -> bool:
        return turn.reply.content >= "Answer 8." and len(turn.reply.content) < 10

    async def step(self, turn: Turn) -> Step:
        return Step(messages=({"role": "user", "content": f"More {turn.number}: " + "word " * 50},))


def read(**values: Any) -> RolloutSettings:
    return RolloutSettings.model_validate({"model": "m", "data": "d", "out": Path("o"), **values})


def is_right(answer: str, task: object) -> bool:
    return True


again = ThinkAgain(is_right)


@pytest.mark.parametrize("stepper", [None, f"{__name__}:again"])
def test_history_wraps_whatever_answers_the_policy(stepper: str | None) -> None:
    made = make_stepper(read(history="window", stepper=stepper))
    assert isinstance(made, Compaction) and made.settings.kind == "window"
    assert made.inner is again if stepper else isinstance(made.inner, ToolsAndFeedback)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"history": "compress"}, "summarise, window, or a function"),
        ({"history": {"at": 1.0}}, "less than 1"),
        ({"history": "summarise", "agent": {"command": ["x"]}}, "an agent keeps its own history"),
        ({"history": {"at": 0.9}}, "lower it to 0.75, or lower `limits.turn_tokens`"),
        ({"history": {}, "limits": {"turn_tokens": 3000}}, "raise `limits.rollout_tokens`"),
        ({"history": {}, "limits": {"response_tokens": 600}}, "raise `limits.response_tokens`"),
        ({"history": "window", "template": {"history": "inference_template"}}, "use `template.history: full`, or"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        read(**values)


def test_function_that_is_not_there_is_named_before_the_run_starts() -> None:
    with pytest.raises(ConfigError, match=r"history\.kind"):
        make_stepper(read(history="no_such.py:shorten"))


def test_metrics_are_means_of_rollouts_and_of_summaries() -> None:
    infos = [
        {"history": {"compactions": 2, "summaries": 2, "summary_tokens": 30, "empty_summaries": 1}},
        {"history": {}},
        {},
    ]
    rollouts = [Rollout(TASK.id, Ledger(), StopReason.DONE, infos=info) for info in infos]
    assert HistorySettings().compute_metrics(rollouts) == {
        "history/compactions": 1.0,
        "history/summary_tokens": 15.0,
        "history/empty_summaries": 1.0,
        "history/ignored_calls": 0.0,
    }
    assert HistorySettings().compute_metrics(rollouts[2:]) == {}
    assert "70% of its context" in HistorySettings().describe()
