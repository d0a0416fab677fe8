"""Tests logprobs of packed sequences with shared prefixes against those of single sequences, and the fallback."""

from __future__ import annotations

from functools import partial, partialmethod
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
from trainer.policy import prefix_forest
from trainer.policy.policy import Policy
from trainer.policy.settings import Checkpointing, PolicyError, UpdateSettings

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
        result = policy_logprobs(Policy(tiny_model(kind), UpdateSettings(logits_chunk=chunk)), rows, temperature)
    assert torch.allclose(result, expected, atol=2e-5)


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_every_model_family_shares_prefixes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_forest, "MAX_BLOCK_NODES", 1)
    model = tiny_models.FAMILIES[family]()
    rows = [[5, 6, 7, *range(40)], [5, 6, 7, *range(30), 1], [5, 6, 8], [9]]
    expected = torch.cat([plain_logprobs(model, ids) for ids in rows])
    policy = Policy(model, UpdateSettings())
    assert not policy.logprob_reader.fallback_reason
    assert torch.allclose(policy_logprobs(policy, rows), expected, atol=1e-4)


def test_chunks_and_checkpointing_do_not_change_the_gradient() -> None:
    def compute_gradient(update: UpdateSettings) -> Tensor:
        model = tiny_model()
        policy_logprobs(Policy(model, update), [[1, 2, 3, 4], [1, 2, 5]]).sum().backward()
        return model_gradient(model)

    whole = compute_gradient(UpdateSettings())
    assert torch.allclose(compute_gradient(UpdateSettings(logits_chunk=1)), whole, atol=1e-5)
    for value in (True, "feed_forward"):
        assert torch.equal(compute_gradient(UpdateSettings(gradient_checkpointing=value)), whole)


# Torch's compiler looks at attributes that torch warns of.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("checkpointing", [False, "feed_forward"])
def test_compiled_layers_give_the_same_gradients_and_are_compiled_once_for_all_lengths(
    checkpointing: Checkpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:  # A compiler that changes nothing: that of torch takes minutes on a CPU.
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=count))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=count))
    compiled, plain = (
        Policy(tiny_model(), UpdateSettings(compile=value, gradient_checkpointing=value and checkpointing))
        for value in (True, False)
    )
    counts = []
    for rows in ([[1, 2, 3, 4, 5], [1, 2, 5]], [[7, 8, 9], [7, 8, 3, 2]], [[*range(20)], [1, 2]], [[*range(40)]]):
        for policy in (plain, compiled):
            policy_logprobs(policy, rows).sum().backward()
        counts.append(len(graphs))
        assert torch.allclose(model_gradient(compiled.model), model_gradient(plain.model), atol=1e-5)
    assert 0 < counts[1] == counts[-1], counts
    assert any("amax" in graph.code for graph in graphs), "the work on logits, too"


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.5)).train(False)


def gemma2(**options: Any) -> PreTrainedModel:
    """A model that caps its logits, those of its attention too."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=50, **sizes, num_key_value_heads=2, head_dim=8, initializer_range=0.3, **options)
    return Gemma2ForCausalLM(config).train(False)


def test_unsupported_model_runs_each_sequence_alone() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 5]]
    expected = torch.cat([plain_logprobs(gemma2(), ids) for ids in rows])
    policy = Policy(gemma2(), UpdateSettings())
    assert "common prefixes are not shared for gemma2" in policy.logprob_reader.fallback_reason
    assert torch.allclose(policy_logprobs(policy, rows), expected, atol=1e-5)
    assert float(policy.logprob_reader.compute_batch_logprobs(pack_sequences(rows)).entropy_T[0].detach()) == 0.0
    assert policy.logprob_reader.compute_hidden_states(*pack_sequences(rows)[:2]).states_UD.shape == (7, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kept", "left_out"),
    [("final_logit_softcapping", "attn_logit_softcapping"), ("softcap", "final_logit_softcapping")],
)
def test_capped_logits_are_noticed_however_coarse_the_dtype(dtype: Any, kept: str, left_out: str) -> None:
    policy = Policy(gemma2(**{left_out: None}), UpdateSettings(dtype=dtype))
    assert f"`{kept}`" in policy.logprob_reader.fallback_reason


def test_model_without_feed_forward_parts_of_that_name_is_refused() -> None:
    with pytest.raises(PolicyError, match="gpt2 models have no part `mlp`"):
        Policy(gpt2(), UpdateSettings(gradient_checkpointing="feed_forward"))


def test_dropout_is_off() -> None:
    policy = Policy(gpt2(), UpdateSettings(gradient_checkpointing=True))
    rows = [[1, 2, 3, 4], [1, 2, 5]]
    assert torch.allclose(
        policy_logprobs(policy, rows), torch.cat([plain_logprobs(gpt2(), ids) for ids in rows]), atol=1e-5
    )
