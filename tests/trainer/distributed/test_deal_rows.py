"""How rows are dealt to ranks: as evenly as by trying every split anew, which takes seconds with many ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.policy.microbatch import MAX_IMBALANCE, deal_rows, shared_cost

Rows = list[tuple[int, ...]]
GROUPS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=6), st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1)),
    min_size=1,
    max_size=6,
)
"""Groups of siblings: a prefix, and what follows it in each row."""


def busiest_cost(units: Sequence[Sequence[int]], ids: Rows, ranks: int) -> tuple[int, int]:
    """The busiest rank's cost and the total, each unit given to the rank with the least so far."""
    costs = sorted((shared_cost([ids[row] for row in unit]) for unit in units), reverse=True)
    totals = [0] * ranks
    for cost in costs:
        totals[totals.index(min(totals))] += cost
    return max(totals), sum(totals)


def slow_busiest_cost(ids: Rows, groups: Sequence[int], ranks: int) -> int:
    """Halves the most expensive unit until the ranks are even, or none is left to halve; the best of all dealings."""
    units = [[row for row in range(len(ids)) if groups[row] == group] for group in dict.fromkeys(groups)]
    best, total = busiest_cost(units, ids, ranks)
    while best * ranks > MAX_IMBALANCE * total and any(len(unit) > 1 for unit in units):
        costs = [shared_cost([ids[row] for row in unit]) if len(unit) > 1 else -1 for unit in units]
        largest = costs.index(max(costs))
        unit = units.pop(largest)
        units[largest:largest] = [unit[: len(unit) // 2], unit[len(unit) // 2 :]]
        busiest, now = busiest_cost(units, ids, ranks)
        if busiest < best:
            best, total = busiest, now
    return best


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(2, 7))
def test_no_rank_is_busier_than_after_trying_every_split(
    families: list[tuple[list[int], list[list[int]]]], ranks: int
) -> None:
    ids = [tuple(prefix + rest) for prefix, rows in families for rest in rows]
    groups = [number for number, (_, rows) in enumerate(families) for _ in rows]
    dealt = deal_rows(ids, groups, ranks)
    assert sorted(row for share in dealt.shares for row in share) == list(range(len(ids)))
    assert shared_cost(ids) == len({row[:length] for row in ids for length in range(1, len(row) + 1)})
    assert max(dealt.costs) <= slow_busiest_cost(ids, groups, ranks)
    for share, cost in zip(dealt.shares, dealt.costs, strict=True):
        by_group = [[ids[row] for row in share if groups[row] == group] for group in set(groups)]
        assert sum(map(shared_cost, by_group)) <= cost


def test_siblings_stay_together_if_that_balances() -> None:
    ids = [(group, group, group, index) for group in range(4) for index in range(2)]
    dealt = deal_rows(ids, [row[0] for row in ids], 2)
    assert sorted(index for share in dealt.shares for index in share) == list(range(8))
    assert all({index ^ 1 for index in share} == set(share) for share in dealt.shares)
    assert dealt.costs == (10, 10) and dealt.imbalance == 1
