"""The prefix cache: returns exactly what was inserted, within its size, and evicts the least recently used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.engine.torch.kv_cache import PrefixCache, common_prefix_length

IDS = st.lists(st.integers(0, 2), max_size=12).map(tuple)


def make_values(ids: Sequence[int]) -> Tensor:
    """A value for each position which depends on all ids up to it, as keys and values do."""
    hashes = [hash(tuple(ids[: index + 1])) % 10**6 for index in range(len(ids))]
    return torch.tensor(hashes, dtype=torch.float32).view(1, 1, 1, -1, 1)


def insert_ids(cache: PrefixCache, ids: Sequence[int]) -> int:
    """Inserts ids, and returns how many positions were read."""
    read = []

    def read_slot(start: int, end: int) -> Tensor:
        read.append(end - start)
        return make_values(ids)[:, :, :, start:end]

    cache.insert(ids, read_slot)
    return sum(read)


def read_values(cache: PrefixCache, ids: Sequence[int]) -> Tensor:
    return torch.cat([torch.zeros(1, 1, 1, 0, 1), *cache.read(ids)], dim=3)


@settings(deadline=None)
@given(st.lists(IDS, max_size=20), IDS)
def test_longest_cached_prefix_is_returned(inserted: list[tuple[int, ...]], query: tuple[int, ...]) -> None:
    cache = PrefixCache(10**6)
    for ids in inserted:
        longest = max((common_prefix_length(ids, other) for other in inserted[: inserted.index(ids)]), default=0)
        assert insert_ids(cache, ids) in {len(ids) - longest, 0}
    expected = max((common_prefix_length(ids, query) for ids in inserted), default=0)
    assert cache.match(query) == expected
    assert torch.equal(read_values(cache, query), make_values(query)[:, :, :, :expected])
    assert cache.tokens == len({ids[:end] for ids in inserted for end in range(1, len(ids) + 1)})


@settings(deadline=None)
@given(st.integers(0, 15), st.lists(st.tuples(st.booleans(), IDS), max_size=40))
def test_cache_stays_within_its_size_and_returns_correct_values(
    max_tokens: int, operations: list[tuple[bool, tuple[int, ...]]]
) -> None:
    cache = PrefixCache(max_tokens)
    for is_insert, ids in operations:
        if is_insert:
            insert_ids(cache, ids)
            assert cache.match(ids) == len(ids) or len(ids) > max_tokens
        assert cache.tokens <= max_tokens
        values = read_values(cache, ids)
        assert torch.equal(values, make_values(ids)[:, :, :, : values.shape[3]])


def test_least_recently_used_leaf_is_evicted_first() -> None:
    cache = PrefixCache(6)
    insert_ids(cache, (1, 2, 3))
    insert_ids(cache, (1, 2, 4))
    insert_ids(cache, (5, 6))
    read_values(cache, (1, 2, 3))
    insert_ids(cache, (7,))
    assert [cache.match(ids) for ids in ((1, 2, 3), (1, 2, 4), (5, 6), (7,))] == [3, 2, 2, 1]
    insert_ids(cache, (8, 8))
    assert [cache.match(ids) for ids in ((1, 2, 3), (5, 6), (7,), (8, 8))] == [3, 0, 1, 2]
