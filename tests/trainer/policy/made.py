"""Tiny models, and lessons that they might have written."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trainer.learn.lesson import Draft, Lesson
from trainer.policy.policy import Policy

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


def model(kind: str = "qwen3", **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=1, **changes)).train(False)  # type: ignore[arg-type]
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8, **changes)  # type: ignore[arg-type]
    return Qwen3ForCausalLM(config).train(False)


def alone(one: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> Tensor:
    """The logprobs of one sequence, the plain way."""
    with torch.no_grad():
        logits = one(torch.tensor([ids])).logits[0].float() / temperature
    picked = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked])


def packed(sequences: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, whose they are, and that all of them are asked for."""
    ids = [token for one in sequences for token in one]
    owner = [place for place, one in enumerate(sequences) for _ in one]
    return torch.tensor(ids), torch.tensor(owner), torch.ones(len(ids), dtype=torch.bool)


def logprobs(policy: Policy, sequences: list[list[int]], temperature: float = 1.0) -> Tensor:
    return policy.read(*packed(sequences), temperature).logprobs_T


def gradient(one: PreTrainedModel) -> Tensor:
    return torch.cat([value.grad.flatten() for value in one.parameters() if value.grad is not None])


def lesson(
    one: PreTrainedModel,
    *,
    groups: int = 2,
    n: int = 3,
    off: float = 0.0,
    rewards: tuple[float, ...] = (),
    temperature: float = 1.0,
) -> Lesson:
    """A task, a turn, a tool's answer, a turn; siblings begin alike. `off` is by how much the engine is mistaken."""
    draw = Random(0)
    drafts, owners = [], []
    for group in range(groups):
        opening = [draw.randrange(50) for _ in range(4)]
        for _ in range(n):
            turns = [[draw.randrange(50) for _ in range(draw.randint(1, 3))] for _ in range(3)]
            ids = [*opening, *turns[0], *turns[1], *turns[2]]
            wrote = [place != 1 for place, turn in enumerate(turns) for _ in turn]
            mask = [False] * 4 + wrote
            turn_of = [-1] * 4 + [(0, -1, 1)[place] for place, turn in enumerate(turns) for _ in turn]
            known = [
                value + off if own else 0.0
                for value, own in zip(alone(one, ids, temperature).tolist(), mask, strict=True)
            ]
            drafts.append(
                Draft(f"{group}/{len(drafts)}", len(drafts), ids, mask, known, [float(own) for own in mask], turn_of)
            )
            owners.append(group)
    given = rewards or tuple(float(draw.random() < 0.5) + place % n / 10 for place in range(len(drafts)))
    return Lesson(tuple(drafts), tuple(one.name for one in drafts), tuple(owners), given, ((0.0, 0.0),) * len(drafts))
