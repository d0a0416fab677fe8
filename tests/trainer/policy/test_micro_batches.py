"""Micro-batches: a shared prefix counts once, groups stay together where they fit; and torch's threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer import tiny_models
from trainer.engine.torch import threads as torch_threads
from trainer.engine.torch.threads import choose_threads, use_threads
from trainer.policy.microbatch import shared_cost, split_micro_batches

PREFIX = tuple(range(80))


def rows_of(*groups: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Groups of so many rows: 80 tokens that all of a group share, and 10 of each row's own."""
    ids, names = [], []
    for group, count in enumerate(groups):
        ids += [(1000 + group, *PREFIX[1:], *(2000 + 100 * row + token for token in range(10))) for row in range(count)]
        names += [group] * count
    return ids, names


def split(ids: list[tuple[int, ...]], groups: list[int], most: int) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in split_micro_batches(ids, groups, most)]


def test_shared_prefix_counts_once_and_groups_stay_together() -> None:
    ids, groups = rows_of(4, 4, 4)
    assert shared_cost(ids[:4]) == 120 and sum(map(len, ids[:4])) == 360
    assert split(ids, groups, 299) == [(0, 4), (4, 8), (8, 12)]
    assert split(ids, groups, 300) == [(0, 8), (8, 12)]
    assert split(ids, groups, 1000) == [(0, 12)]


def test_group_that_does_not_fit_is_cut_and_a_longer_row_is_alone() -> None:
    ids, groups = rows_of(8)
    assert split(ids, groups, 130) == [(0, 3), (3, 6), (6, 8)]
    assert split(ids, groups, 50) == [(row, row + 1) for row in range(8)]
    assert split([], [], 50) == []


def test_rows_of_other_groups_share_what_the_row_before_has() -> None:
    ids = [(*PREFIX, 1000 + row) for row in range(6)]
    assert split(ids, list(range(6)), 120) == [(0, 4), (4, 6)]


@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=12),
    most=st.integers(1, 40),
)
def test_each_row_is_in_one_micro_batch_that_fits(rows: list[tuple[int, list[int]]], most: int) -> None:
    rows.sort(key=lambda row: row[0])
    ids, groups = [tuple(row) for _, row in rows], [group for group, _ in rows]
    parts = split(ids, groups, most)
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(len(rows)))
    assert all(stop - start == 1 or shared_cost(ids[start:stop]) <= most for start, stop in parts)


def test_threads_are_used_where_they_are_measured_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_threads.os, "sched_getaffinity", lambda _: range(4))
    for seconds, chosen in (
        ({1: 4.0, 2: 2.0, 4: 1.0}, 4),
        ({1: 4.0, 2: 2.0, 4: 3.0}, 2),
        ({1: 1.0, 2: 0.9, 4: 2.0}, 1),
    ):
        monkeypatch.setattr(torch_threads, "_measure", lambda count, _, seconds=seconds: seconds[count])
        model = tiny_models.load_model()
        monkeypatch.setattr(torch_threads, "MIN_PARAMETERS", 0)
        assert choose_threads(model) == chosen
        monkeypatch.undo()
        assert choose_threads(model) == 1


def test_threads_are_those_of_before_after_the_block() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), use_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before
