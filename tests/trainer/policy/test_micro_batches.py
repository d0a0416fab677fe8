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


def split(ids: list[tuple[int, ...]], groups: list[int], most: int) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in split_micro_batches(ids, groups, most)]


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
