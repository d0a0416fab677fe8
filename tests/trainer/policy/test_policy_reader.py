"""Rows that are read together, and begun alike, are read as if each were alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tests.trainer import tiny
from tests.trainer.policy.made import alone, gradient, logprobs, model, packed
from trainer.policy import forest as woods
from trainer.policy import reader
from trainer.policy.forest import forest, places
from trainer.policy.policy import Policy
from trainer.policy.reader import Reader
from trainer.policy.settings import UpdateSettings

ROW = st.lists(st.integers(0, 3), min_size=1, max_size=12)
ROWS = st.lists(ROW, min_size=1, max_size=6)
"""Of few ids, so that many begin alike."""


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@given(rows=ROWS, chunk=st.integers(1, 9), temperature=st.sampled_from([1.0, 0.7]), wide=st.sampled_from([1, 9, 512]))
@settings(max_examples=12, deadline=None)
def test_a_row_has_the_logprobs_that_it_has_alone(
    kind: str, rows: list[list[int]], chunk: int, temperature: float, wide: int
) -> None:
    expected = torch.cat([alone(model(kind), ids, temperature) for ids in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(woods, "WIDE", wide)
        got = logprobs(Policy(model(kind), UpdateSettings(chunk=chunk)), rows, temperature)
    assert torch.allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("wide", [1, 512])
@pytest.mark.parametrize("family", sorted(tiny.MAKE))
def test_every_family_is_read_together(family: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(woods, "WIDE", wide)
    one = tiny.MAKE[family]()
    rows = [[5, 6, 7, *range(40)], [5, 6, 7, *range(30), 1], [5, 6, 8], [9]]
    expected = torch.cat([alone(one, ids) for ids in rows])
    policy = Policy(one, UpdateSettings())
    assert not policy.reader.note
    assert torch.allclose(logprobs(policy, rows), expected, atol=1e-4)


@given(ROWS)
def test_a_forest_has_a_node_for_each_beginning_and_no_other(rows: list[list[int]]) -> None:
    ids_T, sequence_T, _ = packed(rows)
    grown = forest(ids_T, sequence_T)
    beginnings = {tuple(row[: stop + 1]) for row in rows for stop in range(len(row))}
    assert len(grown.ids_U) == len(beginnings)
    assert torch.equal(grown.ids_U[grown.at_T], ids_T)
    assert torch.equal(grown.places_U[grown.at_T], places(sequence_T))
    laid = torch.cat([blocks.at_BM.flatten() for blocks in grown.blocks])
    assert torch.equal(laid[grown.back_U], torch.arange(len(beginnings)))


@given(ROWS)
def test_places_count_from_nought_in_each_row(rows: list[list[int]]) -> None:
    assert places(packed(rows)[1]).tolist() == [place for one in rows for place in range(len(one))]


def test_what_other_rows_hold_changes_no_gradient() -> None:
    def moved(other: list[int]) -> Tensor:
        one = model()
        logprobs(Policy(one, UpdateSettings()), [[1, 2, 3, 4], other])[:4].sum().backward()
        return gradient(one)

    assert torch.allclose(moved([1, 2, 7]), moved([9, 9, 9, 9, 9]), atol=1e-6)


def test_chunks_and_checkpoints_change_no_gradient() -> None:
    def moved(update: UpdateSettings) -> Tensor:
        one = model()
        logprobs(Policy(one, update), [[1, 2, 3, 4], [1, 2, 5]]).sum().backward()
        return gradient(one)

    whole = moved(UpdateSettings())
    assert torch.allclose(moved(UpdateSettings(chunk=1)), whole, atol=1e-5)
    assert torch.equal(moved(UpdateSettings(checkpointing=True)), whole)


def test_only_what_is_asked_for_is_told_with_its_entropy() -> None:
    one = model()
    ids_T, sequence_T, _ = packed([[1, 2, 3], [1, 5]])
    with torch.no_grad():
        read = Reader(one, 8).read(ids_T, sequence_T, torch.tensor([True, False, True, False, False]))
    assert read.logprobs_T.nonzero().tolist() == read.entropy_T.nonzero().tolist() == [[2]]
    with torch.no_grad():
        drawn = torch.distributions.Categorical(logits=model()(torch.tensor([[1, 2, 3]])).logits[0, 1])
    assert float(read.entropy_T[2]) == pytest.approx(float(drawn.entropy()), rel=1e-5)
    assert float(read.logprobs_T[2]) == pytest.approx(float(drawn.log_prob(torch.tensor(3))), rel=1e-5)


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5)).train(False)


def capped() -> PreTrainedModel:
    """Its logits are no product of its last layer alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=50, **sizes, num_key_value_heads=2, head_dim=8, initializer_range=0.3)
    return Gemma2ForCausalLM(config).train(False)


def test_a_model_that_cannot_be_read_so_is_read_row_by_row_and_says_so() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 5]]
    expected = torch.cat([alone(capped(), ids) for ids in rows])
    policy = Policy(capped(), UpdateSettings())
    assert "one rollout after the other" in policy.reader.note
    assert torch.allclose(logprobs(policy, rows), expected, atol=1e-5)
    assert float(policy.read(*packed(rows)).entropy_T[0]) == 0.0
    assert policy.reader.hidden(*packed(rows)[:2]).values_UD.shape == (7, 16)


def test_so_is_one_whose_layers_are_of_an_unknown_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LAYERS", {"sliding_attention"})
    assert "it has layers of kind full_attention" in Reader(model(), 8).note


def test_so_is_one_that_knows_no_forest() -> None:
    deaf = model()
    deaf.base_model.forward = functools.partial(heard, deaf.base_model.forward)  # type: ignore[method-assign]
    assert "TypeError: no such argument" in Reader(deaf, 8).note
    assert deaf.config._attn_implementation == "sdpa"


def heard(forward: Callable[..., Any], **given: Any) -> Any:
    if "forest" in given:
        raise TypeError("no such argument")
    return forward(**given)


def test_nothing_is_dropped_at_random() -> None:
    policy = Policy(gpt2(), UpdateSettings(checkpointing=True))
    rows = [[1, 2, 3, 4], [1, 2, 5]]
    assert torch.allclose(logprobs(policy, rows), torch.cat([alone(gpt2(), ids) for ids in rows]), atol=1e-5)
