"""Tiny models, and train batches with rollouts that they could have generated."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trainer.algorithms.train_batch import TrainBatch, TrainSequence
from trainer.policy.logprobs import PackedTokens
from trainer.policy.policy import Policy

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip


def tiny_model(kind: str = "qwen3", **changes: object) -> PreTrainedModel:
    """A model with two layers and fixed random weights."""
    torch.manual_seed(0)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes}, num_key_value_heads=1)).train(False)  # type: ignore[arg-type]
    config = Qwen3Config(**{**SIZES, **changes}, num_key_value_heads=2, head_dim=8)  # type: ignore[arg-type]
    return Qwen3ForCausalLM(config).train(False)


def plain_logprobs(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> Tensor:
    """The logprobs of one sequence, by the model's own forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float() / temperature
    selected = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), selected])


def pack_sequences(sequences: list[list[int]], temperature: float = 1.0) -> PackedTokens:
    """Packed sequences, of which all tokens are selected."""
    ids = [token for sequence in sequences for token in sequence]
    owners = [index for index, sequence in enumerate(sequences) for _ in sequence]
    return PackedTokens(torch.tensor(ids), torch.tensor(owners), torch.ones(len(ids), dtype=torch.bool), temperature)


def policy_logprobs(policy: Policy, sequences: list[list[int]], temperature: float = 1.0) -> Tensor:
    return policy.logprob_reader.compute_batch_logprobs(pack_sequences(sequences, temperature)).logprobs_T


def model_gradient(model: PreTrainedModel) -> Tensor:
    return torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])


def example_batch(
    model: PreTrainedModel,
    *,
    groups: int = 2,
    n: int = 3,
    off: float = 0.0,
    rewards: tuple[float, ...] = (),
    temperature: float = 1.0,
) -> TrainBatch:
    """Rollouts of a task, a turn, a tool result and a turn; siblings share the task. `off` is the engine's error."""
    draw = Random(0)
    sequences, owners = [], []
    for group in range(groups):
        opening = [draw.randrange(50) for _ in range(4)]
        for _ in range(n):
            turns = [[draw.randrange(50) for _ in range(draw.randint(1, 3))] for _ in range(3)]
            ids = [*opening, *turns[0], *turns[1], *turns[2]]
            mask = [False] * 4 + [index != 1 for index, turn in enumerate(turns) for _ in turn]
            turn_of = [-1] * 4 + [(0, -1, 1)[index] for index, turn in enumerate(turns) for _ in turn]
            engine_logprobs = [
                value + off if is_policy else 0.0
                for value, is_policy in zip(plain_logprobs(model, ids, temperature).tolist(), mask, strict=True)
            ]
            sequences.append(
                TrainSequence(
                    f"{group}/{len(sequences)}",
                    len(sequences),
                    ids,
                    mask,
                    engine_logprobs,
                    [float(is_policy) for is_policy in mask],
                    turn_of,
                )
            )
            owners.append(group)
    rewards = rewards or tuple(float(draw.random() < 0.5) + index % n / 10 for index in range(len(sequences)))
    return TrainBatch(
        tuple(sequences),
        tuple(sequence.name for sequence in sequences),
        tuple(owners),
        rewards,
        ((0.0, 0.0),) * len(sequences),
    )
