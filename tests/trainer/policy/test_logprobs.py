"""Tests logprobs of packed sequences with shared prefixes against those of single sequences, and the fallback."""

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

from tests.trainer import tiny_models
from tests.trainer.policy.tiny_policies import (
    model_gradient,
    pack_sequences,
    plain_logprobs,
    policy_logprobs,
    tiny_model,
)
from trainer.policy import logprobs as logprobs_module
from trainer.policy import prefix_forest
from trainer.policy.logprobs import LogprobReader
from trainer.policy.policy import Policy
from trainer.policy.prefix_forest import build_forest, token_positions
from trainer.policy.settings import UpdateSettings

ROW = st.lists(st.integers(0, 3), min_size=1, max_size=12)
ROWS = st.lists(ROW, min_size=1, max_size=6)
"""Few ids, so that many sequences share a prefix."""


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@given(
    rows=ROWS,
    chunk=st.integers(1, 9),
    temperature=st.sampled_from([1.0, 0.7]),
    block_nodes=st.sampled_from([1, 9, 512]),
)
@settings(max_examples=12, deadline=None)
def test_packed_logprobs_equal_those_of_single_sequences(
    kind: str, rows: list[list[int]], chunk: int, temperature: float, block_nodes: int
) -> None:
    expected = torch.cat([plain_logprobs(tiny_model(kind), ids, temperature) for ids in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_forest, "MAX_BLOCK_NODES", block_nodes)
        result = policy_logprobs(Policy(tiny_model(kind), UpdateSettings(chunk=chunk)), rows, temperature)
    assert torch.allclose(result, expected, atol=2e-5)


@pytest.mark.parametrize("block_nodes", [1, 512])
@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_every_model_family_shares_prefixes(family: str, block_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_forest, "MAX_BLOCK_NODES", block_nodes)
    model = tiny_models.FAMILIES[family]()
    rows = [[5, 6, 7, *range(40)], [5, 6, 7, *range(30), 1], [5, 6, 8], [9]]
    expected = torch.cat([plain_logprobs(model, ids) for ids in rows])
    policy = Policy(model, UpdateSettings())
    assert not policy.logprob_reader.fallback_reason
    assert torch.allclose(policy_logprobs(policy, rows), expected, atol=1e-4)


@given(ROWS)
def test_forest_has_one_node_per_prefix(rows: list[list[int]]) -> None:
    ids_T, sequence_T, _ = pack_sequences(rows)
    forest = build_forest(ids_T, sequence_T)
    prefixes = {tuple(row[: stop + 1]) for row in rows for stop in range(len(row))}
    assert len(forest.ids_U) == len(prefixes)
    assert torch.equal(forest.ids_U[forest.node_T], ids_T)
    assert torch.equal(forest.positions_U[forest.node_T], token_positions(sequence_T))
    nodes = torch.cat([blocks.node_BM.flatten() for blocks in forest.blocks])
    assert torch.equal(nodes[forest.output_U], torch.arange(len(prefixes)))


@given(ROWS)
def test_token_positions_start_at_zero_in_each_sequence(rows: list[list[int]]) -> None:
    assert token_positions(pack_sequences(rows)[1]).tolist() == [
        position for row in rows for position in range(len(row))
    ]


def test_other_sequences_do_not_change_the_gradient() -> None:
    def compute_gradient(other: list[int]) -> Tensor:
        model = tiny_model()
        policy_logprobs(Policy(model, UpdateSettings()), [[1, 2, 3, 4], other])[:4].sum().backward()
        return model_gradient(model)

    assert torch.allclose(compute_gradient([1, 2, 7]), compute_gradient([9, 9, 9, 9, 9]), atol=1e-6)


def test_chunks_and_checkpointing_do_not_change_the_gradient() -> None:
    def compute_gradient(update: UpdateSettings) -> Tensor:
        model = tiny_model()
        policy_logprobs(Policy(model, update), [[1, 2, 3, 4], [1, 2, 5]]).sum().backward()
        return model_gradient(model)

    whole = compute_gradient(UpdateSettings())
    assert torch.allclose(compute_gradient(UpdateSettings(chunk=1)), whole, atol=1e-5)
    assert torch.equal(compute_gradient(UpdateSettings(checkpointing=True)), whole)


def test_only_selected_tokens_have_logprob_and_entropy() -> None:
    model = tiny_model()
    ids_T, sequence_T, _ = pack_sequences([[1, 2, 3], [1, 5]])
    with torch.no_grad():
        result = LogprobReader(model, 8).compute_batch_logprobs(
            ids_T, sequence_T, torch.tensor([True, False, True, False, False])
        )
    assert result.logprobs_T.nonzero().tolist() == result.entropy_T.nonzero().tolist() == [[2]]
    with torch.no_grad():
        distribution = torch.distributions.Categorical(logits=tiny_model()(torch.tensor([[1, 2, 3]])).logits[0, 1])
    assert float(result.entropy_T[2]) == pytest.approx(float(distribution.entropy()), rel=1e-5)
    assert float(result.logprobs_T[2]) == pytest.approx(float(distribution.log_prob(torch.tensor(3))), rel=1e-5)


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5)).train(False)


def gemma2() -> PreTrainedModel:
    """A model that caps its logits."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=50, **sizes, num_key_value_heads=2, head_dim=8, initializer_range=0.3)
    return Gemma2ForCausalLM(config).train(False)


def test_unsupported_model_runs_each_sequence_alone() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 5]]
    expected = torch.cat([plain_logprobs(gemma2(), ids) for ids in rows])
    policy = Policy(gemma2(), UpdateSettings())
    assert "common prefixes are not shared for gemma2" in policy.logprob_reader.fallback_reason
    assert torch.allclose(policy_logprobs(policy, rows), expected, atol=1e-5)
    assert float(policy.compute_batch_logprobs(*pack_sequences(rows)).entropy_T[0]) == 0.0
    assert policy.logprob_reader.compute_hidden_states(*pack_sequences(rows)[:2]).states_UD.shape == (7, 16)


def test_model_with_unknown_layer_types_runs_each_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "SUPPORTED_LAYERS", {"sliding_attention"})
    assert "it has layers of type full_attention" in LogprobReader(tiny_model(), 8).fallback_reason


def test_model_that_rejects_the_forest_runs_each_sequence_alone() -> None:
    model = tiny_model()
    model.base_model.forward = functools.partial(forward_without_forest, model.base_model.forward)  # type: ignore[method-assign]
    assert "TypeError: no such argument" in LogprobReader(model, 8).fallback_reason
    assert model.config._attn_implementation == "sdpa"


def forward_without_forest(forward: Callable[..., Any], **kwargs: Any) -> Any:
    if "forest" in kwargs:
        raise TypeError("no such argument")
    return forward(**kwargs)


def test_dropout_is_off() -> None:
    policy = Policy(gpt2(), UpdateSettings(checkpointing=True))
    rows = [[1, 2, 3, 4], [1, 2, 5]]
    assert torch.allclose(
        policy_logprobs(policy, rows), torch.cat([plain_logprobs(gpt2(), ids) for ids in rows]), atol=1e-5
    )
