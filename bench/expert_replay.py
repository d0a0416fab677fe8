"""Router replay: how far a tiny Qwen3-MoE's logprobs in training are from a real server's, with and without it.

python bench/real_model.py --only experts     # two minutes; `make sglang` first
The server computes in bfloat16 and tells the experts of each token, the trainer computes in float32: the same tokens
are read with the experts that the trainer's routers choose, and with the server's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.algorithms.loss import measure_mismatch
from trainer.algorithms.packing import BatchRow, pack
from trainer.engine.base import Engine, Sampling
from trainer.engine.sglang.launch import TESTED
from trainer.engine.sglang.server_process import ServerOptions, ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.ledger import Author, Entry, Ledger
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.policy.update import recompute_logprobs

SHAPE: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
OPTIONS = ServerOptions(
    context=1024, cache_tokens=32768, extra=("--dtype", "bfloat16", "--enable-return-routed-experts")
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is sampled; lengths are in ids."""

    rollouts: int = 16
    turns: int = 4
    opening: int = 40
    written: int = 32
    answered: int = 20
    """Ids between two turns, which the policy did not write."""


async def measure_replay(size: Size = Size()) -> dict[str, Any]:
    """The mismatch of the same tokens, without replay and with it."""
    torch.manual_seed(0)
    with TemporaryDirectory() as place:
        folder = Path(place)
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE)).save_pretrained(folder)
        policy, ledgers = Policy.load(folder, UpdateSettings()), list[Ledger]()
        async with SGLangEngine([ServerProcess(folder, OPTIONS, log=folder / "log")], TensorSync()) as engine:
            await engine.publish(policy.weights, 0)
            async with anyio.create_task_group() as tasks:
                for number in range(size.rollouts):
                    tasks.start_soon(_play, engine, size, number, ledgers)
    reader, found = policy.logprob_reader, dict[str, Any]()
    batch = pack([_make_row(ledger) for ledger in ledgers])
    for name, experts_TX in (("without", None), ("with", batch.experts_TX)):
        plan = reader.plan(batch.ids_T, batch.sequence_T, batch.trained_T, experts_TX)
        old_T = recompute_logprobs(batch, reader, 1.0, plan)
        found[name] = asdict(measure_mismatch(batch.with_old_logprobs(old_T)))
    return {"size": asdict(size), "replay": found, "model": "random weights", "versions": f"SGLang {TESTED[0]}"}


async def _play(engine: Engine, size: Size, number: int, ledgers: list[Ledger]) -> None:
    draw = random.Random(number)
    ledger = Ledger() + _draw_ids(draw, Author.TASK, size.opening)
    for turn in range(size.turns):
        sampling = Sampling(max_tokens=size.written, experts_from=ledger.routed_tokens, seed=number * size.turns + turn)
        written = await engine.generate(ledger.ids, sampling, key=str(number))
        ledger += Entry(Author.POLICY, written.ids, logprobs=written.logprobs, experts=written.experts)
        ledger += _draw_ids(draw, Author.TOOL, size.answered)
    ledgers.append(ledger)


def _draw_ids(draw: random.Random, author: Author, count: int) -> Entry:
    return Entry(author, tuple(draw.randrange(SHAPE["vocab_size"]) for _ in range(count)))


def _make_row(ledger: Ledger) -> BatchRow:
    weights = [float(written) for written in ledger.mask]
    return BatchRow("", ledger.ids, ledger.mask, ledger.logprobs, weights, weights, experts=ledger.experts)


def format_replay(found: Mapping[str, Mapping[str, float]]) -> str:
    """A table of the mismatch without and with replay."""
    tokens = found["with"]["tokens"]
    lines = [f"| a tiny Qwen3-MoE, {tokens:,} tokens of SGLang in bfloat16 | KL | mean | most |", "|---|--:|--:|--:|"]
    for name, what in (("without", "experts that the trainer chooses"), ("with", "the server's experts, replayed")):
        kl, mean, most = (found[name][key] for key in ("kl", "mean", "maximum"))
        lines.append(f"| {what} | {kl:.1e} | {mean:.3f} | {most:.2f} |")
    return "\n".join(lines)
