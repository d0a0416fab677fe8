"""Attention over a forest in one kernel sees exactly what the blocks see; compiled, it only runs on a GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer import tiny_models
from tests.trainer.policy.tiny_policies import plain_logprobs, policy_logprobs
from trainer.policy.flex_forest import BLOCK, SHORTEST, PreOrder, ladder_length
from trainer.policy.policy import Policy
from trainer.policy.prefix_forest import build_forest
from trainer.policy.settings import UpdateSettings

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # as on a CPU

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=7)
LONG_ROWS = st.lists(
    st.tuples(st.integers(1, 400), st.integers(0, 2), st.integers(1, 500)).map(
        lambda sizes: [7] * sizes[0] + [sizes[1]] + [8] * sizes[2]
    ),
    min_size=1,
    max_size=5,
)
"""Rows that part after a common beginning of another length each, over several blocks of the mask."""


def make_order(rows: list[list[int]]) -> tuple[PreOrder, list[tuple[int, ...]]]:
    """The pre-order of these rows' forest, and the row up to and with the node at each place."""
    ids_T = torch.tensor([token for row in rows for token in row])
    sequence_T = torch.tensor([number for number, row in enumerate(rows) for _ in row])
    forest = build_forest(ids_T, sequence_T, one_kernel=True)
    assert forest.pre_order is not None
    prefixes = [tuple(row[: end + 1]) for row in rows for end in range(len(row))]
    place_T = forest.pre_order.place_U[forest.node_T]
    paths = dict(zip(place_T.tolist(), prefixes, strict=True))
    return forest.pre_order, [paths[place] for place in range(len(paths))]


def dense(order: PreOrder, window: int | None = None) -> Tensor:
    """The mask for every pair of places."""
    place_L = torch.arange(len(order.end_L))
    sees = order.make_mask(window).mask_mod
    return sees(torch.tensor(0), torch.tensor(0), place_L[:, None], place_L[None, :])


@given(rows=ROWS, window=st.sampled_from([None, 1, 3]))
@settings(max_examples=60, deadline=None)
def test_a_node_sees_its_ancestors_itself_and_nothing_else(rows: list[list[int]], window: int | None) -> None:
    order, paths = make_order(rows)
    seen = dense(order, window)
    for query, path in enumerate(paths):
        expected = {path[: end + 1] for end in range(len(path))}
        if window is not None:
            expected = {prefix for prefix in expected if len(path) - len(prefix) < window}
        assert {paths[key] for key in seen[query, : len(paths)].nonzero()[:, 0].tolist()} == expected
        assert not seen[query, len(paths) :].any(), "padding is seen by itself alone"
    assert seen.diagonal().all()


@given(rows=LONG_ROWS, window=st.sampled_from([None, 200]))
@settings(max_examples=25, deadline=None)
def test_blocks_that_are_skipped_hide_nothing_and_those_without_a_mask_show_everything(
    rows: list[list[int]], window: int | None
) -> None:
    order, _ = make_order(rows)
    mask, length = order.make_mask(window), len(order.end_L)
    seen_QK = dense(order, window).view(length // BLOCK, BLOCK, length // BLOCK, BLOCK)
    some, whole = seen_QK.any(3).any(1), seen_QK.all(3).all(1)
    listed, unmasked = torch.zeros_like(some), torch.zeros_like(some)
    for target, counts, indexes in (
        (listed, mask.kv_num_blocks, mask.kv_indices),
        (unmasked, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        assert counts is not None and indexes is not None
        for query, count in enumerate(counts[0, 0].tolist()):
            target[query, indexes[0, 0, query, :count].long()] = True
    assert not (some & ~listed & ~unmasked).any() and not (unmasked & ~whole).any() and not (listed & unmasked).any()
    if window is None:
        assert torch.equal(listed | unmasked, some), "no block is computed in vain"
        assert torch.equal(
            unmasked | torch.eye(len(some), dtype=torch.bool), whole | torch.eye(len(some), dtype=torch.bool)
        )


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_every_model_family_takes_the_one_kernel(family: str) -> None:
    model = tiny_models.FAMILIES[family]()
    rows = [[5, 6, 7, *range(40)], [5, 6, 7, *range(30), 1], [5, 6, 8], [9]]
    with torch.no_grad():
        expected = torch.cat([plain_logprobs(model, ids) for ids in rows])
        policy = Policy(model, UpdateSettings())
        policy.logprob_reader.one_kernel = True
        assert torch.allclose(policy_logprobs(policy, rows), expected, atol=1e-4)


def test_micro_batches_of_any_size_need_few_kernels() -> None:
    lengths = {ladder_length(nodes) for nodes in range(1, 8193)}
    assert lengths == set(accumulate([2] * 3, lambda length, factor: length * factor, initial=SHORTEST))
    assert all(ladder_length(nodes) >= nodes and ladder_length(nodes) % BLOCK == 0 for nodes in range(1, 8193))
