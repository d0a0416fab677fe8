"""Measures the torch engine beside what transformers offers, on rollouts of several turns, in one run.

python -m bench.engine              # two minutes; prints a table
python -m bench.engine --rollouts 8 --rounds 1
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import anyio
import torch
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from trainer.demo.facts.model import SHAPE
from trainer.engine.base import Sampling
from trainer.engine.torch import TorchEngine

VOCABULARY = 832
TURNS = 4
SIBLINGS = 8
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Plan:
    """One rollout: how it begins, how long each turn of the policy is, and what the tools answer."""

    prompt: list[int]
    lengths: list[int]
    replies: list[list[int]]


@dataclass
class Tally:
    """What an engine did for all rollouts."""

    tokens: int = 0
    cached: int = 0
    possible: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class Walk:
    """A rollout on its way."""

    plan: Plan
    ids: list[int] = field(default_factory=list)
    turn: int = 0
    known: int = 0

    def __post_init__(self) -> None:
        self.ids = list(self.plan.prompt)

    @property
    def left(self) -> int:
        return self.plan.lengths[self.turn]

    def take(self, written: Sequence[int], tally: Tally) -> bool:
        """Whether another turn follows."""
        tally.tokens += len(written)
        tally.possible += self.known
        self.ids += written
        self.known = len(self.ids)
        self.ids += self.plan.replies[self.turn]
        self.turn += 1
        return self.turn < TURNS


def plans(rollouts: int) -> list[Plan]:
    chance = random.Random(0)

    def some(count: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(count)]

    made = []
    for index in range(rollouts):
        prompt = made[-1].prompt if index % SIBLINGS else some(60)
        lengths = [chance.randint(10, 50) for _ in range(TURNS)]
        made.append(Plan(prompt, lengths, [some(20) for _ in range(TURNS)]))
    return made


def model(vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """The tiny model of the default job."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPE,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).train(False)


def ours(model: PreTrainedModel, chosen: list[Plan], tally: Tally, tool_s: float = 0.0) -> None:
    async def rollout(engine: TorchEngine, seed: int, plan: Plan) -> None:
        walk, more = Walk(plan), True
        while more:
            written = await engine.generate(walk.ids, Sampling(max_tokens=walk.left, seed=seed))
            tally.cached += written.cached
            if more := walk.take(written.ids, tally):
                await anyio.sleep(tool_s)

    async def run() -> None:
        async with TorchEngine(model, rows=64) as engine, anyio.create_task_group() as tasks:
            for seed, plan in enumerate(chosen):
                tasks.start_soon(rollout, engine, seed, plan)

    anyio.run(run)
    tally.possible += sum(len(plan.prompt) for index, plan in enumerate(chosen) if index % SIBLINGS)


def one_by_one(model: PreTrainedModel, chosen: list[Plan], tally: Tally, tool_s: float = 0.0) -> None:
    for plan in chosen:
        walk, more = Walk(plan), True
        while more:
            if more := walk.take(_generate(model, [walk.ids], walk.left)[0], tally):
                time.sleep(tool_s)


def lock_step(model: PreTrainedModel, chosen: list[Plan], tally: Tally, tool_s: float = 0.0) -> None:
    walks = [Walk(plan) for plan in chosen]
    for turn in range(TURNS):
        time.sleep(tool_s if turn else 0.0)
        written = _generate(model, [walk.ids for walk in walks], max(walk.left for walk in walks))
        for walk, ids in zip(walks, written, strict=True):
            walk.take(ids[: walk.left], tally)


def _generate(model: PreTrainedModel, asked: list[list[int]], count: int) -> list[list[int]]:
    """With the logprobs that a trainer would need, as ours has them."""
    longest = max(map(len, asked))
    ids = torch.tensor([[0] * (longest - len(some)) + some for some in asked])
    mask = torch.tensor([[0] * (longest - len(some)) + [1] * len(some) for some in asked])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, longest:]
    torch.stack(out.logits, dim=1).log_softmax(-1).gather(2, new[..., None])
    return [[int(token) for token in row] for row in new]


def continuous(model: PreTrainedModel, chosen: list[Plan], tally: Tally, tool_s: float = 0.0) -> None:
    """Small pages, as prefixes are shared by whole ones; room for all rollouts at once."""
    sampling = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
    config = ContinuousBatchingConfig(
        page_size=32, num_blocks=1024, max_batch_tokens=512, max_requests_per_batch=64, return_logprobs=True
    )
    due: deque[tuple[float, Walk]] = deque((0.0, Walk(plan)) for plan in chosen)
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=config) as requests:
        walks: dict[str, Walk] = {}
        while walks or due:
            while due and due[0][0] <= time.perf_counter():
                walk = due.popleft()[1]
                walks[requests.add_request(walk.ids, max_new_tokens=walk.left)] = walk
            wait_s = max(0.001, due[0][0] - time.perf_counter()) if due else PATIENCE_S
            result = requests.get_result(timeout=wait_s)
            if result is None and due:
                continue
            if result is None or result.error:
                raise RuntimeError(f"continuous batching gave up: {result and result.error}")
            walk = walks.pop(result.request_id)
            if walk.take(result.generated_tokens, tally):
                due.append((time.perf_counter() + tool_s, walk))


PEERS: dict[str, Callable[[PreTrainedModel, list[Plan], Tally, float], None]] = {
    "torch engine": ours,
    "generate, a rollout at a time": one_by_one,
    "generate, in lock step": lock_step,
    "continuous batching": continuous,
}


def measure(name: str, chosen: list[Plan], tool_s: float = 0.0, vocabulary: int = VOCABULARY) -> Tally:
    tally, fresh = Tally(), model(vocabulary)
    wall, cpu = time.perf_counter(), time.process_time()
    PEERS[name](fresh, chosen, tally, tool_s)
    tally.wall_s, tally.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    expected = sum(sum(plan.lengths) for plan in chosen)
    if tally.tokens != expected:
        raise RuntimeError(f"{name} wrote {tally.tokens} tokens, not {expected}")
    return tally


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rollouts", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    torch.set_num_threads(1)
    chosen = plans(asked.rollouts)
    for name in PEERS:
        measure(name, chosen[:2])
    found: dict[str, list[Tally]] = {name: [] for name in PEERS}
    for _ in range(asked.rounds):
        for name in PEERS:
            found[name].append(measure(name, chosen))
    print(f"{asked.rollouts} rollouts of {TURNS} turns, one thread, median of {asked.rounds}\n")
    print("| engine | tokens/s | tokens per core-second | ours over it | cached of possible |\n|---|--:|--:|--:|--:|")
    best = median(tally.tokens / tally.cpu_s for tally in found["torch engine"])
    for name, tallies in found.items():
        wall = median(tally.tokens / tally.wall_s for tally in tallies)
        cpu = median(tally.tokens / tally.cpu_s for tally in tallies)
        share = f"{tallies[0].cached / tallies[0].possible:.1%}" if tallies[0].cached else ""
        print(f"| {name} | {wall:.0f} | {cpu:.0f} | {best / cpu:.1f}x | {share} |")


if __name__ == "__main__":
    main()
