"""The tree gives back exactly what was put in, as far as it remembers, and never holds more than it may."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.engine.torch.tree import Tree, common

IDS = st.lists(st.integers(0, 2), max_size=12).map(tuple)


def values(ids: Sequence[int]) -> Tensor:
    """A value for each position which depends on all ids up to it, as keys and values do."""
    seen = [hash(tuple(ids[: at + 1])) % 10**6 for at in range(len(ids))]
    return torch.tensor(seen, dtype=torch.float32).view(1, 1, 1, -1, 1)


def put(tree: Tree, ids: Sequence[int]) -> int:
    """How many positions were read for it."""
    read = []

    def slot(start: int, end: int) -> Tensor:
        read.append(end - start)
        return values(ids)[:, :, :, start:end]

    tree.insert(ids, slot)
    return sum(read)


def get(tree: Tree, ids: Sequence[int]) -> Tensor:
    return torch.cat([torch.zeros(1, 1, 1, 0, 1), *tree.read(ids)], dim=3)


@settings(deadline=None)
@given(st.lists(IDS, max_size=20), IDS)
def test_the_longest_known_prefix_comes_back(known: list[tuple[int, ...]], asked: tuple[int, ...]) -> None:
    tree = Tree(10**6)
    for ids in known:
        longest = max((common(ids, other) for other in known[: known.index(ids)]), default=0)
        assert put(tree, ids) in {len(ids) - longest, 0}
    expected = max((common(ids, asked) for ids in known), default=0)
    assert tree.match(asked) == expected
    assert torch.equal(get(tree, asked), values(asked)[:, :, :, :expected])
    assert tree.tokens == len({ids[:end] for ids in known for end in range(1, len(ids) + 1)})


@settings(deadline=None)
@given(st.integers(0, 15), st.lists(st.tuples(st.booleans(), IDS), max_size=40))
def test_it_never_holds_more_than_it_may_and_never_gives_what_is_wrong(
    budget: int, acts: list[tuple[bool, tuple[int, ...]]]
) -> None:
    tree = Tree(budget)
    for insert, ids in acts:
        if insert:
            put(tree, ids)
            assert tree.match(ids) == len(ids) or len(ids) > budget
        assert tree.tokens <= budget
        found = get(tree, ids)
        assert torch.equal(found, values(ids)[:, :, :, : found.shape[3]])


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = Tree(6)
    put(tree, (1, 2, 3))
    put(tree, (1, 2, 4))
    put(tree, (5, 6))
    get(tree, (1, 2, 3))
    put(tree, (7,))
    assert [tree.match(ids) for ids in ((1, 2, 3), (1, 2, 4), (5, 6), (7,))] == [3, 2, 2, 1]
    put(tree, (8, 8))
    assert [tree.match(ids) for ids in ((1, 2, 3), (5, 6), (7,), (8, 8))] == [3, 0, 1, 2]


def test_a_half_that_was_evicted_frees_its_memory() -> None:
    tree = Tree(100)
    put(tree, (1, 2, 3, 4))
    put(tree, (1, 2, 9))
    (kept,) = tree.read((1, 2))
    assert kept.untyped_storage().nbytes() == 2 * 4


@settings(deadline=None)
@given(IDS, IDS)
def test_common_counts_equal_ids_from_the_first(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    count = common(left, right)
    assert left[:count] == right[:count]
    assert count == min(len(left), len(right)) or left[count] != right[count]
