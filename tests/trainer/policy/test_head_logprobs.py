"""Tests logprobs from slices of the vocabulary against those from all logits, in value and gradient."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from trainer.policy.head_logprobs import PLAIN, compile_steps, compute_head_logprobs, find_top_logprobs

STATES, WIDTH, VOCABULARY = 5, 8, 23
INDEX_K = torch.tensor([0, 0, 2, 4, 4, 4])
IDS_K = torch.tensor([22, 3, 0, 7, 7, 15])
"""Tokens that follow the same state, one of them twice; no token follows states 1 and 3."""


def make_head(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCABULARY, bias=bias)


def make_states() -> Tensor:
    return (3 * torch.randn(STATES, WIDTH, generator=torch.Generator().manual_seed(1))).requires_grad_()


def use_all_logits(head: nn.Module, states_ND: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs_NV = (head(states_ND).float() / temperature).log_softmax(-1)
    return logprobs_NV[INDEX_K, IDS_K], -(logprobs_NV.exp() * logprobs_NV).sum(-1)[INDEX_K]


def weigh(logprobs_K: Tensor) -> Tensor:
    return (logprobs_K * torch.linspace(-1, 2, len(logprobs_K))).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, STATES])
@pytest.mark.parametrize("bonus", [0.0, 0.3])
def test_slices_of_the_vocabulary_give_the_same_values_and_gradients(
    bonus: float, chunk: int, bias: bool, temperature: float
) -> None:
    head, other, states_ND, others_ND = make_head(bias), make_head(bias), make_states(), make_states()
    logprobs_K, entropy_K = compute_head_logprobs(head, states_ND, INDEX_K, IDS_K, temperature, chunk)
    expected_K, expected_entropy_K = use_all_logits(other, others_ND, temperature)
    for values_K, entropies_K in ((logprobs_K, entropy_K), (expected_K, expected_entropy_K)):
        loss = weigh(values_K) + bonus * weigh(entropies_K) if bonus else weigh(values_K)
        loss.backward()  # type: ignore[no-untyped-call]
    pairs = [(logprobs_K, expected_K), (entropy_K, expected_entropy_K), (states_ND.grad, others_ND.grad)]
    pairs += [(first.grad, second.grad) for first, second in zip(head.parameters(), other.parameters(), strict=True)]
    for first, second in pairs:
        assert first is not None and second is not None and torch.allclose(first, second, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, STATES])
@pytest.mark.parametrize("top", [1, 6, VOCABULARY])
def test_most_likely_ids_are_found_slice_by_slice(top: int, chunk: int) -> None:
    head, states_ND = make_head(bias=True), make_states()
    ids_NK, logprobs_NK = find_top_logprobs(head, states_ND, top, 0.6, chunk)
    expected = (head(states_ND) / 0.6).log_softmax(-1).topk(top)
    assert torch.equal(ids_NK, expected.indices) and torch.allclose(logprobs_NK, expected.values, atol=1e-5)


def test_no_more_logits_are_in_memory_than_the_chunk_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = nn.functional.linear

    def record(*arguments: Tensor) -> Tensor:
        result = original(*arguments)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(nn.functional, "linear", record)
    logprobs_K, _ = compute_head_logprobs(make_head(), make_states(), INDEX_K, IDS_K, 1.0, 2)
    weigh(logprobs_K).backward()  # type: ignore[no-untyped-call]
    assert len(sizes) == 6 and max(sizes) <= 2 * VOCABULARY, "three slices, computed again in the backward pass"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # by torch itself
def test_compiled_steps_give_the_same_in_few_operations_and_are_compiled_once_for_all_sizes() -> None:
    torch._dynamo.reset()
    compiled, graphs, before = compile_steps(), list[int](), counters["stats"]["unique_graphs"]
    # Tokens, states and the width of a slice differ, or are equal; the last slice of 23 ids is narrower.
    for states, tokens, vocabulary in ((5, 6, 23), (11, 4, 50), (9, 9, 40), (8, 16, 16)):
        for chunk, bonus in ((2, 0.0), (2, 0.3), (states, 0.3)):
            generator = torch.Generator().manual_seed(states)
            index_K = torch.randint(states, (tokens,), generator=generator).sort().values
            ids_K, results, operations = torch.randint(vocabulary, (tokens,), generator=generator), [], []
            for steps in (PLAIN, compiled):
                torch.manual_seed(0)
                head = nn.Linear(WIDTH, vocabulary, bias=bool(bonus))
                states_ND = torch.randn(states, WIDTH, requires_grad=True)
                with torch.profiler.profile() as profile:
                    values_K, entropy_K = compute_head_logprobs(head, states_ND, index_K, ids_K, 0.6, chunk, steps)
                    loss = weigh(values_K) + bonus * weigh(entropy_K) if bonus else weigh(values_K)
                    gradients = torch.autograd.grad(loss, [states_ND, *head.parameters()])
                results.append([values_K, entropy_K, *gradients])
                operations.append(sum(event.count for event in profile.key_averages() if "aten::" in event.key))
            for first, second in zip(*results, strict=True):
                assert torch.allclose(first, second, atol=1e-6)
            assert not graphs or operations[1] < 0.7 * operations[0], operations
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [5] * 4, "with and without kept probabilities, and slices without an entropy's gradient"


def test_logits_of_any_size_give_finite_gradients() -> None:
    head, states_ND = make_head(), (1e4 * make_states().detach()).requires_grad_()
    logprobs_K, entropy_K = compute_head_logprobs(head, states_ND, INDEX_K, IDS_K, 1.0, 1)
    weigh(logprobs_K).backward()  # type: ignore[no-untyped-call]
    assert states_ND.grad is not None and bool(states_ND.grad.isfinite().all() & entropy_K.isfinite().all())


def test_bfloat16_logits_are_summed_in_float32() -> None:
    head, states_ND = make_head().bfloat16(), make_states().detach().bfloat16().requires_grad_()
    logprobs_K, _ = compute_head_logprobs(head, states_ND, INDEX_K, IDS_K, 1.0, 1)
    expected_K, _ = use_all_logits(head, states_ND, 1.0)
    assert logprobs_K.dtype == torch.float32 and torch.allclose(logprobs_K, expected_K, atol=1e-5)
    weigh(logprobs_K).backward()  # type: ignore[no-untyped-call]
    assert states_ND.grad is not None and states_ND.grad.dtype == torch.bfloat16


class AdaptedHead(nn.Module):
    """A head whose product is not that of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.first = make_head(bias=True), nn.Linear(WIDTH, 2, bias=False)
        self.second = nn.Linear(2, VOCABULARY, bias=False)

    def forward(self, states_ND: Tensor) -> Tensor:
        output: Tensor = self.base(states_ND) + self.second(self.first(states_ND))
        return output


def test_head_with_adapters_has_the_gradients_of_its_parts() -> None:
    torch.manual_seed(3)
    head, states_ND, gradients = AdaptedHead(), make_states(), []
    values = compute_head_logprobs(head, states_ND, INDEX_K, IDS_K, 1.0, 2), use_all_logits(head, states_ND, 1.0)
    for logprobs_K, _ in values:
        gradients.append(torch.autograd.grad(weigh(logprobs_K), [*head.parameters(), states_ND]))
    assert torch.allclose(values[0][0], values[1][0], atol=1e-5)
    assert all(torch.allclose(first, second, atol=1e-5) for first, second in zip(*gradients, strict=True))
