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
@given(st.integers(0, 15) | st.just(10**6), st.lists(st.tuples(st.booleans(), IDS), max_size=40))
def test_cache_stays_within_its_size_and_returns_the_longest_prefix_that_it_has(
    max_tokens: int, operations: list[tuple[bool, tuple[int, ...]]]
) -> None:
    cache, inserted = PrefixCache(max_tokens), set[tuple[int, ...]]()
    for is_insert, ids in operations:
        longest = max((common_prefix_length(ids, other) for other in inserted), default=0)
        values = read_values(cache, ids)
        assert torch.equal(values, make_values(ids)[:, :, :, : values.shape[3]])
        assert values.shape[3] == cache.match(ids) <= longest
        if max_tokens == 10**6:
            assert cache.match(ids) == longest
            assert cache.tokens == len({each[:end] for each in inserted for end in range(1, len(each) + 1)})
        if is_insert:
            read = insert_ids(cache, ids)
            inserted.add(ids)
            assert max_tokens < 10**6 or read == len(ids) - longest
            assert cache.match(ids) == len(ids) or len(ids) > max_tokens
        assert cache.tokens <= max_tokens


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
