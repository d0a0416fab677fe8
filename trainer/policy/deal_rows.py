"""Deals a step's rows to ranks by cost: each rank gets about as many tokens to compute, siblings together if possible.

Siblings share a prefix, which is computed once on a rank (see `prefix_forest`); on two ranks it is computed twice. A
group is split only if that evens out the ranks. Every rank deals the same rows in the same way, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_IMBALANCE = 1.1
"""Groups are split while the busiest rank has more than this many times the mean cost."""
Ids = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class DealtRows:
    """The rows of each rank, as indexes in ascending order."""

    shares: tuple[tuple[int, ...], ...]
    costs: tuple[int, ...]
    """Tokens that each rank computes, shared prefixes once."""

    @property
    def imbalance(self) -> float:
        """The busiest rank's cost as a multiple of the mean; 1 if all ranks have the same."""
        total = sum(self.costs)
        return max(self.costs) * len(self.costs) / total if total else 1.0


def deal_rows(ids: Ids, groups: Sequence[int], ranks: int) -> DealtRows:
    """Deals rows to ranks. `groups` names the siblings."""
    rows = range(len(ids))
    if ranks == 1:
        return DealtRows((tuple(rows),), (sum(map(len, ids)),))
    units = [[index for index in rows if groups[index] == group] for group in dict.fromkeys(groups)]
    best = _deal_units(units, ids, ranks)
    while best.imbalance > MAX_IMBALANCE and (halved := _split_largest(units, ids)):
        units = halved
        dealt = _deal_units(units, ids, ranks)
        if max(dealt.costs) < max(best.costs):
            best = dealt
    return best


def shared_cost(ids: Ids) -> int:
    """The number of tokens to compute if common prefixes are computed once."""
    ordered = sorted(map(tuple, ids))
    return sum(map(len, ordered)) - sum(_common_length(first, second) for first, second in pairwise(ordered))


def _deal_units(units: Sequence[Sequence[int]], ids: Ids, ranks: int) -> DealtRows:
    """Gives each unit, the most expensive first, to the rank with the least so far."""
    costs = [shared_cost([ids[index] for index in unit]) for unit in units]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for position in sorted(range(len(units)), key=lambda position: (-costs[position], position)):
        rank = min(range(ranks), key=lambda rank: (totals[rank], rank))
        shares[rank] += units[position]
        totals[rank] += costs[position]
    return DealtRows(tuple(tuple(sorted(share)) for share in shares), tuple(totals))


def _split_largest(units: Sequence[list[int]], ids: Ids) -> list[list[int]]:
    """Halves the most expensive unit that has more than one row; empty if there is none."""
    splittable = [index for index, unit in enumerate(units) if len(unit) > 1]
    if not splittable:
        return []
    largest = max(splittable, key=lambda index: shared_cost([ids[row] for row in units[index]]))
    unit = units[largest]
    middle = len(unit) // 2
    return [*units[:largest], unit[:middle], unit[middle:], *units[largest + 1 :]]


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix. Compares slices, which is fast for long rows."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
