"""Packed sequences are seen as if each were alone, and a step is made whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer.policy import Policy, PolicyError, UpdateSettings, places

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


def model(kind: str = "qwen3") -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES))  # type: ignore[arg-type]
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))  # type: ignore[arg-type]


def alone(one: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> Tensor:
    """The logprobs of one sequence, the plain way."""
    with torch.no_grad():
        logits = one(torch.tensor([ids])).logits[0].float() / temperature
    picked = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked])


def packed(sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = [token for one in sequences for token in one]
    owner = [place for place, one in enumerate(sequences) for _ in one]
    return torch.tensor(ids), torch.tensor(owner)


SEQUENCES = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=12), min_size=1, max_size=5)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@given(sequences=SEQUENCES, chunk=st.integers(1, 9), temperature=st.sampled_from([1.0, 0.7]))
@settings(max_examples=8, deadline=None)
def test_a_packed_sequence_has_the_logprobs_that_it_has_alone(
    kind: str, sequences: list[list[int]], chunk: int, temperature: float
) -> None:
    one = model(kind)
    got = Policy(one, UpdateSettings(chunk=chunk)).logprobs(*packed(sequences), temperature=temperature)
    expected = torch.cat([alone(one, ids, temperature) for ids in sequences])
    assert torch.allclose(got, expected, atol=2e-5)


@given(SEQUENCES)
def test_places_count_from_nought_in_each_sequence(sequences: list[list[int]]) -> None:
    _, owner = packed(sequences)
    assert places(owner).tolist() == [place for one in sequences for place in range(len(one))]


def test_what_other_sequences_hold_changes_no_gradient() -> None:
    def gradient(other: list[int]) -> Tensor:
        one = model()
        logprobs = Policy(one, UpdateSettings()).logprobs(*packed([[1, 2, 3, 4], other]))
        logprobs[:4].sum().backward()
        return torch.cat([value.grad.flatten() for value in one.parameters() if value.grad is not None])

    assert torch.allclose(gradient([5, 6, 7]), gradient([9, 9, 9, 9, 9]), atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_make_what_is_rewarded_likelier(optimizer: str) -> None:
    policy = Policy(model(), UpdateSettings(optimizer=optimizer, lr=2e-2, warmup=2, steps=8))  # type: ignore[arg-type]
    ids, owner = packed([[1, 2, 3, 4, 5, 6]])
    before = policy.logprobs(ids, owner).sum().item()
    for _ in range(8):
        (-policy.logprobs(ids, owner).sum()).backward()
        told = policy.step()
    assert policy.logprobs(ids, owner).sum().item() > before + 5
    assert policy.steps == 8 and told["update/lr"] < 2e-2


def test_a_gradient_that_is_not_finite_moves_nothing_and_says_what_to_do() -> None:
    policy = Policy(model(), UpdateSettings())
    before = {name: value.clone() for name, value in policy.weights.items()}
    (policy.logprobs(*packed([[1, 2, 3]])).sum() * float("nan")).backward()
    with pytest.raises(PolicyError, match=r"not finite.*Lower `lr`"):
        policy.step()
    assert policy.steps == 0
    assert all(torch.equal(before[name], value) for name, value in policy.weights.items())


def test_the_rate_rises_stays_and_falls() -> None:
    policy = Policy(model(), UpdateSettings(warmup=4, steps=14, floor=0.2))
    shares = [policy.share(step) for step in range(20)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0] and shares[4] == 1.0
    assert shares[14:] == pytest.approx([0.2] * 6) and sorted(shares[4:], reverse=True) == shares[4:]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_going_on_from_a_saved_step_gives_the_same_weights_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    ids, owner = packed([[1, 2, 3, 4], [7, 8, 9]])
    update = UpdateSettings(optimizer=optimizer, steps=10)  # type: ignore[arg-type]

    def learn(policy: Policy, steps: int) -> Policy:
        for _ in range(steps):
            (-policy.logprobs(ids, owner).sum()).backward()
            policy.step()
        return policy

    through = learn(Policy(model(), update), 6)
    first = learn(Policy(model(), update), 3)
    first.save(tmp_path)
    again = Policy(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), update)
    again.resume(tmp_path)
    learn(again, 3)
    assert again.steps == 6
    assert all(torch.equal(value, again.weights[name]) for name, value in through.weights.items())
