"""Attention in one kernel gives the values and gradients of the blocks: for any forest, and where ranks share rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from tests.trainer.policy.tiny_policies import model_gradient, pack_sequences, tiny_model
from trainer.policy import context_parallel
from trainer.policy.context_parallel import ContextGroup
from trainer.policy.flex_forest import BLOCK, SHORTEST
from trainer.policy.logprobs import LogprobReader
from trainer.policy.prefix_forest import CONTEXT

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),  # as on a CPU
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # that torch looks at, and hides from others
]
PREFIX = [token % 50 for token in range(3 * BLOCK + 7)]
LONG_ROWS = [[*PREFIX, *range(40)] * 3, [*PREFIX, 3, *[9, 8, 7] * BLOCK], [*PREFIX, 3, 9], [7, 8]]
ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(2, 200)), min_size=1, max_size=3).map(
        lambda runs: [token % 50 for first, count in runs for token in range(first, first + count)]
    ),
    min_size=1,
    max_size=4,
)
"""Of few runs of ids, so that rows part at random places, within blocks and between them."""
RANKS = 2


@pytest.fixture(autouse=True)
def gradients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses them there, since its compiled kernel has none; its reference has."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def compute(
    model: PreTrainedModel, one_kernel: bool, context: ContextGroup | None = None, rows: list[list[int]] = LONG_ROWS
) -> list[Tensor]:
    """Logprobs and entropies, and the gradient in parts of its largest number if a rank has all of it."""
    setattr(model, CONTEXT, context)
    reader, tokens = LogprobReader(model, 64), pack_sequences(rows)
    assert not reader.fallback_reason
    reader.one_kernel = one_kernel
    plan = reader.plan(*tokens[:3])
    assert plan is not None
    assert rows is not LONG_ROWS or len(plan.forest.output_U) > SHORTEST, "the kernel's second length"
    with torch.set_grad_enabled(context is None):
        result = reader.compute_batch_logprobs(tokens, plan)
    values = [result.logprobs_T.detach(), result.entropy_T]
    if context is None:
        model.zero_grad()
        result.logprobs_T.sum().backward()  # type: ignore[no-untyped-call]
        gradient = model_gradient(model)
        values.append(gradient / gradient.abs().max())
    return values


@given(rows=ROWS, window=st.sampled_from([None, 1, 30, 200]))
@example(rows=LONG_ROWS, window=200)
@settings(max_examples=6, deadline=None)
def test_any_forest_has_the_values_and_gradients_of_the_blocks(rows: list[list[int]], window: int | None) -> None:
    config: dict[str, Any] = {} if window is None else {
        "use_sliding_window": True, "sliding_window": window,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip
    model = tiny_model(num_hidden_layers=3, **config)
    expected, found = compute(model, False, rows=rows), compute(model, True, rows=rows)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, expected, strict=True))
    if rows is LONG_ROWS:
        whole = compute(tiny_model(num_hidden_layers=3), False)
        assert not torch.allclose(expected[0], whole[0], atol=1e-3), "windows hide something"


@contextmanager
def threads_as_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    """Threads that exchange tensors as ranks do; the group of each is its number."""
    barrier, sent = Barrier(RANKS), dict[int, Tensor]()

    def exchange(rank: int, values: Tensor) -> list[Tensor]:
        sent[rank] = values
        barrier.wait(60)
        received = [sent[other].clone() for other in range(RANKS)]
        barrier.wait(60)
        return received

    def all_to_all_single(result: Tensor, values: Tensor, *_: Any, group: int) -> None:
        result.copy_(torch.cat([other.chunk(RANKS)[group] for other in exchange(group, values)]))

    def all_reduce(values: Tensor, group: int) -> None:
        values.copy_(torch.stack(exchange(group, values)).sum(0))

    monkeypatch.setattr(context_parallel.dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(context_parallel.dist, "all_reduce", all_reduce)
    with ThreadPoolExecutor(RANKS) as threads:
        yield threads


def test_ranks_that_share_long_rows_have_the_values_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, models = compute(tiny_model(), False)[:2], [tiny_model() for _ in range(RANKS)]
    with threads_as_ranks(monkeypatch) as threads:
        ranks = [
            threads.submit(compute, model, True, ContextGroup(rank, RANKS, rank)) for rank, model in enumerate(models)
        ]
        for rank in ranks:
            assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(rank.result(120), expected, strict=True))
