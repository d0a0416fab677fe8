"""Every view on a ledger is what a slow walk over its tokens says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Audio, Image, Text, Video
from tests.trainer.rollouts import bits, entries, ledgers
from trainer.engine.base import Written
from trainer.ledger import Author, Entry, Ledger, Place, spelled

POLICY = Author.POLICY


def tokens(ledger: Ledger) -> Iterator[tuple[Entry, int, int]]:
    """Each token's entry, its place in that entry, and how many turns had begun by then."""
    turns = 0
    for entry in ledger.entries:
        turns += entry.author is POLICY
        for place in range(len(entry.ids)):
            yield entry, place, turns


@given(ledgers())
def test_token_views_line_up_with_who_wrote_what(ledger: Ledger) -> None:
    walk = list(tokens(ledger))
    assert list(ledger.ids) == [entry.ids[place] for entry, place, _ in walk]
    assert list(ledger.mask) == [entry.author is POLICY for entry, _, _ in walk]
    assert bits(list(ledger.logprobs)) == bits(
        [entry.logprobs[place] if entry.logprobs else 0.0 for entry, place, _ in walk]
    )
    assert list(ledger.versions) == [
        entry.version if place >= len(entry.before) else entry.before[0][0] for entry, place, _ in walk
    ]
    assert len(ledger) == len(walk)


@given(st.lists(st.integers(0, 3)))
def test_versions_are_told_in_short_and_known_of_each_id(versions: list[int]) -> None:
    last, before = spelled(versions, 9)
    entry = Entry(POLICY, (7,) * len(versions), logprobs=(-1.0,) * len(versions), version=last, before=before)
    assert list(entry.versions) == versions and (versions or last == 9)
    assert len(before) <= sum(one != other for one, other in pairwise(versions))
    assert Written(entry.ids, entry.logprobs or (), "stop", last, 0, before).versions == entry.versions


def test_no_more_ids_have_versions_than_there_are() -> None:
    with pytest.raises(ValueError, match="1 ids with versions"):
        Entry(POLICY, (7,), logprobs=(-1.0,), version=2, before=((1, 2),))


@given(ledgers())
def test_each_token_knows_its_entry_author_and_turn(ledger: Ledger) -> None:
    for token, (entry, _, turns) in enumerate(tokens(ledger)):
        assert ledger.entry_at(token) is entry
        assert ledger.author_at(token) is entry.author
        assert ledger.turn_of(token) == (turns - 1 if turns else None)


@given(ledgers())
def test_as_many_tokens_are_trained_as_the_policy_wrote(ledger: Ledger) -> None:
    assert sum(ledger.mask) == sum(len(turn.ids) for turn in ledger.turns)
    assert [turn.author for turn in ledger.turns] == [POLICY] * len(ledger.turns)


@given(ledgers(), st.booleans(), st.lists(entries(), max_size=4))
def test_what_is_written_stays_as_it_is_when_more_is_added(ledger: Ledger, seen: bool, more: list[Entry]) -> None:
    for entry in more:
        before = tuple(token for written in ledger for token in written.ids)
        if seen:
            assert ledger.ids == before
        grown = ledger + entry
        assert grown.ids == before + entry.ids
        assert grown.ids == Ledger(grown.entries).ids
        assert [*grown] == [*ledger, entry]
        ledger = grown


@given(ledgers())
def test_rewards_belong_to_the_turn_that_they_answer(ledger: Ledger) -> None:
    slow: list[list[float]] = []
    for entry in ledger:
        if entry.author is POLICY:
            slow.append([])
        if entry.reward is not None and slow:
            slow[-1].append(entry.reward)
    assert bits([list(turn) for turn in ledger.rewards]) == bits(slow)
    assert len(ledger.rewards) == len(ledger.turns)


@given(ledgers())
def test_media_stand_where_their_ids_stand(ledger: Ledger) -> None:
    slow: list[Place] = []
    begin = 0
    for entry in ledger:
        media = [part for part in entry.parts if isinstance(part, Image | Audio | Video)]
        for number, (start, stop) in enumerate(entry.spans):
            slow += [Place(media[number], begin + start, begin + stop)] if start < stop else []
        begin += len(entry.ids)
    assert list(ledger.places) == slow
    assert list(ledger.images) == [place.medium for place in slow if isinstance(place.medium, Image)]
    assert list(ledger.messages) == [message for entry in ledger for message in entry.messages]


@given(ledgers())
def test_each_turn_asks_for_all_that_stands_before_it(ledger: Ledger) -> None:
    asked = cached = before = 0
    for entry in ledger:
        if entry.author is POLICY:
            asked, cached = asked + before, cached + entry.cached
        before += len(entry.ids)
    assert (ledger.asked, ledger.cached) == (asked, cached)


def test_a_token_that_is_not_there_is_refused() -> None:
    ledger = Ledger() + Entry(Author.TASK, (1, 2))
    for token in (-1, 2):
        with pytest.raises(IndexError, match=f"no token {token}"):
            ledger.author_at(token)
    assert ledger.turn_of(1) is None


def test_only_what_the_policy_wrote_has_logprobs() -> None:
    with pytest.raises(ValueError, match="nothing else has any"):
        Entry(Author.TOOL, (1,), logprobs=(0.0,))
    with pytest.raises(ValueError, match="nothing else has any"):
        Entry(POLICY, (1,))
    with pytest.raises(ValueError, match="2 ids with 1 logprobs"):
        Entry(POLICY, (1, 2), logprobs=(0.0,))


def test_only_tools_and_feedback_give_rewards() -> None:
    with pytest.raises(ValueError, match="only a tool or feedback"):
        Entry(POLICY, (1,), logprobs=(0.0,), reward=1.0)
    assert Entry(Author.FEEDBACK, (1,), reward=0.0).reward == 0.0


def test_a_span_lies_within_its_entry_and_has_a_medium() -> None:
    image = Image(b"x")
    assert Entry(Author.TOOL, (7, 7), parts=(Text("a"), image), spans=((0, 2),)).media == (image,)
    with pytest.raises(ValueError, match="do not lie within"):
        Entry(Author.TOOL, (7, 7), parts=(image,), spans=((1, 3),))
    with pytest.raises(ValueError, match="0 media with 1 spans"):
        Entry(Author.TOOL, (7, 7), parts=(Text("a"),), spans=((0, 2),))


def test_two_hundred_turns_over_fifty_thousand_tokens_cost_little() -> None:
    began = time.thread_time()
    ledger = Ledger() + Entry(Author.TASK, tuple(range(1000)))
    for turn in range(200):
        asked = ledger.ids
        ledger += Entry(POLICY, tuple(range(125)), logprobs=(-0.5,) * 125, version=turn)
        ledger += Entry(Author.TOOL, tuple(range(125)), reward=1.0)
        assert ledger.ids[: len(asked)] == asked
    assert len(ledger) == len(ledger.mask) == len(ledger.logprobs) == 51_000
    assert [ledger.turn_of(token) for token in (999, 1000, 50_999)] == [None, 0, 199]
    assert time.thread_time() - began < 2
