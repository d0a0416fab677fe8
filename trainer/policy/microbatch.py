"""Divides rows among ranks, and packs them into micro-batches, deterministically; means of metrics over these."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from typing import NamedTuple

from trainer.algorithms.packing import Batch, BatchRow, pack
from trainer.ledger import common_length
from trainer.policy.ranks import Ranks

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
    if ranks == 1:
        return DealtRows((tuple(range(len(ids))),), (sum(map(len, ids)),))
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    siblings = [_Siblings(ids, rows) for rows in members.values()]
    units = sorted(_Unit(-each.cost(each.rows), place, 0, each.rows) for place, each in enumerate(siblings))
    return _deal_units(_split_until_even(units, siblings, ranks), ranks)


def shared_cost(ids: Ids) -> int:
    """The number of tokens to compute if common prefixes are computed once."""
    return _Siblings(ids, range(len(ids))).cost(range(len(ids)))


class _Siblings:
    """The rows of a group, compared once: the cost of any of its parts follows from the lengths of common prefixes."""

    def __init__(self, ids: Ids, rows: Sequence[int]) -> None:
        self.rows = rows
        ordered = sorted(rows, key=lambda row: tuple(ids[row]))
        self._place = {row: place for place, row in enumerate(ordered)}
        self._lengths = [len(ids[row]) for row in ordered]
        self._common = [common_length(ids[first], ids[second]) for first, second in pairwise(ordered)]
        """Of each row and the next one in lexical order; rows further apart share the least of those between them."""

    def cost(self, rows: Sequence[int]) -> int:
        """The tokens to compute for some of the rows."""
        places = sorted(self._place[row] for row in rows)
        shared = sum(min(self._common[first:second]) for first, second in pairwise(places))
        return sum(self._lengths[place] for place in places) - shared


class _Unit(NamedTuple):
    """Siblings that stay on one rank. Units sort by cost, the highest first, and then by the order of their rows."""

    negative_cost: int
    group: int
    start: int
    """The place of its first row in the group."""
    rows: Sequence[int]

    def halve(self, siblings: _Siblings) -> tuple[_Unit, _Unit]:
        """Two units with half of the rows each."""
        middle = len(self.rows) // 2
        first, second = self.rows[:middle], self.rows[middle:]
        return (
            _Unit(-siblings.cost(first), self.group, self.start, first),
            _Unit(-siblings.cost(second), self.group, self.start + middle, second),
        )


def _split_until_even(units: list[_Unit], siblings: Sequence[_Siblings], ranks: int) -> list[_Unit]:
    """Halves the most expensive unit again and again; returns the units that keep the busiest rank's cost lowest.

    Ends once ranks are even enough. Splitting only adds cost, so it also ends once an even share of the present cost
    is as much as the busiest rank has in the best dealing.
    """
    total = -sum(unit.negative_cost for unit in units)
    best, least = list(units), _find_busiest(units, ranks)
    is_even = least * ranks <= MAX_IMBALANCE * total
    splittable = [unit for unit in units if len(unit.rows) > 1]
    heapify(splittable)
    while not is_even and splittable:
        unit = heappop(splittable)
        del units[bisect_left(units, unit)]
        for half in unit.halve(siblings[unit.group]):
            insort(units, half)
            total -= half.negative_cost
            if len(half.rows) > 1:
                heappush(splittable, half)
        total += unit.negative_cost
        if total >= least * ranks:
            break
        if -units[0].negative_cost < least and (busiest := _find_busiest(units, ranks)) < least:
            best, least = list(units), busiest
            is_even = least * ranks <= MAX_IMBALANCE * total
    return best


def _find_busiest(units: Sequence[_Unit], ranks: int) -> int:
    """The busiest rank's cost as `_deal_units` deals."""
    totals = [0] * ranks
    for unit in units:
        heapreplace(totals, totals[0] - unit.negative_cost)
    return max(totals)


def _deal_units(units: Sequence[_Unit], ranks: int) -> DealtRows:
    """Gives each unit, the most expensive first, to the rank with the least so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for unit in units:
        total, rank = loads[0]
        shares[rank] += unit.rows
        heapreplace(loads, (total - unit.negative_cost, rank))
    totals = {rank: total for total, rank in loads}
    return DealtRows(tuple(tuple(sorted(share)) for share in shares), tuple(totals[rank] for rank in range(ranks)))


SHARED_COST = 8
"""A token of a shared prefix costs the first row its whole memory, and each further one this part of it: attention."""


def split_micro_batches(ids: Ids, groups: Sequence[int], max_tokens: int) -> Iterator[slice]:
    """Splits rows, of which neighbours are siblings, into micro-batches of at most `max_tokens`; a longer row is alone.

    Cuts between groups where it can: siblings that are apart compute their prefix twice.
    """
    start, tokens, row = 0, 0, 0
    while row < len(ids):
        end = next((other for other in range(row, len(ids)) if groups[other] != groups[row]), len(ids))
        if tokens and tokens + sum(_count_new(ids, start, row, other) for other in range(row, end)) > max_tokens:
            yield slice(start, row)
            start, tokens = row, 0
        for other in range(row, end):
            cost = _count_new(ids, start, row, other)
            if other > start and tokens + cost > max_tokens:
                yield slice(start, other)
                start, tokens, cost = other, 0, len(ids[other])
            tokens += cost
        row = end
    if start < len(ids):
        yield slice(start, len(ids))


def _count_new(ids: Ids, start: int, group: int, row: int) -> int:
    """What a row adds to the micro-batch that begins at `start`, after its siblings, the first of which is `group`."""
    earlier = range(max(start, min(group, row - 1)), row)
    shared = max((common_length(ids[other], ids[row]) for other in earlier), default=0)
    return len(ids[row]) - shared + shared // SHARED_COST


def split_evenly(rows: int, parts: int) -> Iterator[slice]:
    """Splits rows into parts of almost equal size, none of them empty."""
    parts = min(parts, rows)
    for part in range(parts):
        yield slice(rows * part // parts, rows * (part + 1) // parts)


class MetricMeans:
    """Weighted means of metrics over micro-batches; a name that ends in `max` is a maximum."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._maxima: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float], weight: float) -> None:
        for name, value in metrics.items():
            if name.endswith("max"):
                self._maxima[name] = max(value, self._maxima.get(name, value))
            elif weight:
                self._sums[name] = self._sums.get(name, 0.0) + value * weight
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def merge(self, ranks: Ranks) -> None:
        """Includes what the other ranks added."""
        sums, weights, maxima = zip(*ranks.gather([self._sums, self._weights, self._maxima]), strict=True)
        self._sums, self._weights = _combine(sums, operator.add), _combine(weights, operator.add)
        self._maxima = _combine(maxima, max)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value / self._weights[name] for name, value in self._sums.items()} | self._maxima


def _combine(parts: Sequence[Mapping[str, float]], combine: Callable[[float, float], float]) -> dict[str, float]:
    combined: dict[str, float] = {}
    for name, value in (item for part in parts for item in part.items()):
        combined[name] = combine(combined[name], value) if name in combined else value
    return combined


PADDING_ROW = BatchRow("padding", (0, 0), (False, False), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
"""A row without trained tokens, for a rank that has fewer micro-batches than another: its gradient is 0."""


def deal_batches(
    rows: Sequence[BatchRow], ranks: Ranks, max_tokens: int
) -> tuple[list[tuple[Batch, tuple[int, ...]]], DealtRows]:
    """This rank's micro-batches with the rows that each has, none if it is padding; and the shares of all ranks."""
    dealt = deal_rows([row.ids for row in rows], [row.group for row in rows], ranks.shares)
    parts = [
        list(split_micro_batches([rows[row].ids for row in share], [rows[row].group for row in share], max_tokens))
        for share in dealt.shares
    ]
    own = dealt.shares[ranks.share]
    batches = [(pack([rows[index] for index in own[part]]), tuple(own[part])) for part in parts[ranks.share]]
    missing = max(map(len, parts)) - len(batches)
    return batches + [(pack([PADDING_ROW]), ())] * missing, dealt
