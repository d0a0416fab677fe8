"""Views of a ledger equal what a slow walk over its entries computes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.types import Audio, Image, Text, Video
from tests.trainer.rollout_strategies import bitwise_key, ledgers
from trainer.engine.base import Generation
from trainer.ledger import Author, Entry, Ledger, MediaSpan, encode_version_runs

POLICY = Author.POLICY


def walk_tokens(ledger: Ledger) -> Iterator[tuple[Entry, int, int]]:
    """Each token's entry, its offset in that entry, and the number of turns that have started."""
    turns = 0
    for entry in ledger.entries:
        turns += entry.author is POLICY
        for offset in range(len(entry.ids)):
            yield entry, offset, turns


@given(ledgers())
def test_token_views_match_a_walk_over_the_entries(ledger: Ledger) -> None:
    walk = list(walk_tokens(ledger))
    assert list(ledger.ids) == [entry.ids[offset] for entry, offset, _ in walk]
    assert list(ledger.mask) == [entry.author is POLICY for entry, _, _ in walk]
    assert bitwise_key(list(ledger.logprobs)) == bitwise_key(
        [entry.logprobs[offset] if entry.logprobs else 0.0 for entry, offset, _ in walk]
    )
    assert list(ledger.versions) == [
        entry.version if offset >= len(entry.earlier_versions) else entry.earlier_versions[0][0]
        for entry, offset, _ in walk
    ]
    assert len(ledger) == len(walk)


@given(st.lists(st.integers(0, 3)))
def test_run_length_versions_expand_to_the_version_of_each_id(versions: list[int]) -> None:
    last, earlier = encode_version_runs(versions, 9)
    entry = Entry(
        POLICY, (7,) * len(versions), logprobs=(-1.0,) * len(versions), version=last, earlier_versions=earlier
    )
    assert list(entry.versions) == versions and (versions or last == 9)
    assert len(earlier) <= sum(version != following for version, following in pairwise(versions))
    assert Generation(entry.ids, entry.logprobs or (), "stop", last, 0, earlier).versions == entry.versions


@given(ledgers())
def test_media_spans_match_the_spans_of_entries(ledger: Ledger) -> None:
    expected: list[MediaSpan] = []
    begin = 0
    for entry in ledger:
        media = [part for part in entry.parts if isinstance(part, Image | Audio | Video)]
        for number, (start, stop) in enumerate(entry.spans):
            expected += [MediaSpan(media[number], begin + start, begin + stop)] if start < stop else []
        begin += len(entry.ids)
    assert list(ledger.media_spans) == expected
    assert list(ledger.images) == [span.medium for span in expected if isinstance(span.medium, Image)]
    assert list(ledger.messages) == [message for entry in ledger for message in entry.messages]


def test_entry_rejects_missing_or_unexpected_logprobs() -> None:
    with pytest.raises(ValueError, match="other entries must have none"):
        Entry(Author.TOOL, (1,), logprobs=(0.0,))
    with pytest.raises(ValueError, match="other entries must have none"):
        Entry(POLICY, (1,))
    with pytest.raises(ValueError, match="2 ids with 1 logprobs"):
        Entry(POLICY, (1, 2), logprobs=(0.0,))


def test_entry_rejects_spans_outside_its_ids_or_without_media() -> None:
    image = Image(b"x")
    assert Entry(Author.TOOL, (7, 7), parts=(Text("a"), image), spans=((0, 2),)).media == (image,)
    with pytest.raises(ValueError, match="do not lie within"):
        Entry(Author.TOOL, (7, 7), parts=(image,), spans=((1, 3),))
    with pytest.raises(ValueError, match="0 media with 1 spans"):
        Entry(Author.TOOL, (7, 7), parts=(Text("a"),), spans=((0, 2),))
