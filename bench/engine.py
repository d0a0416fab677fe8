"""Throughput of the torch engine against ways to generate with transformers, on rollouts of several turns.

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

from mtrl_plugins.demo.facts.facts_demo import MODEL_SHAPE
from trainer.engine.base import Sampling
from trainer.engine.torch.torch_engine import TorchEngine

VOCABULARY = 832
TURNS = 4
SIBLINGS = 8
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RolloutPlan:
    """One rollout: the prompt, the length of each turn of the policy, and the ids of the tools' replies."""

    prompt: list[int]
    lengths: list[int]
    replies: list[list[int]]


@dataclass
class Tally:
    """What an engine did for all rollouts."""

    tokens: int = 0
    cached: int = 0
    cacheable: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class RolloutProgress:
    """The state of a rollout under way."""

    plan: RolloutPlan
    ids: list[int] = field(default_factory=list)
    turn: int = 0
    cacheable: int = 0
    """Ids that the engine processed in earlier turns."""

    def __post_init__(self) -> None:
        self.ids = list(self.plan.prompt)

    @property
    def turn_length(self) -> int:
        return self.plan.lengths[self.turn]

    def add_turn(self, generated: Sequence[int], tally: Tally) -> bool:
        """Adds a turn and the tools' reply; returns whether another turn follows."""
        tally.tokens += len(generated)
        tally.cacheable += self.cacheable
        self.ids += generated
        self.cacheable = len(self.ids)
        self.ids += self.plan.replies[self.turn]
        self.turn += 1
        return self.turn < TURNS


def make_plans(rollouts: int) -> list[RolloutPlan]:
    """Random rollouts in groups that share a prompt."""
    rng = random.Random(0)

    def random_ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    plans: list[RolloutPlan] = []
    for index in range(rollouts):
        prompt = plans[-1].prompt if index % SIBLINGS else random_ids(60)
        lengths = [rng.randint(10, 50) for _ in range(TURNS)]
        plans.append(RolloutPlan(prompt, lengths, [random_ids(20) for _ in range(TURNS)]))
    return plans


def make_model(vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """The tiny model of the default job, with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **MODEL_SHAPE,
        vocab_size=vocabulary,
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config).train(False)


def run_torch_engine(model: PreTrainedModel, plans: list[RolloutPlan], tally: Tally, tool_s: float = 0.0) -> None:
    """mtrl's torch engine, all rollouts concurrently."""

    async def rollout(engine: TorchEngine, seed: int, plan: RolloutPlan) -> None:
        progress, has_next = RolloutProgress(plan), True
        while has_next:
            generation = await engine.generate(progress.ids, Sampling(max_tokens=progress.turn_length, seed=seed))
            tally.cached += generation.cached_tokens
            if has_next := progress.add_turn(generation.ids, tally):
                await anyio.sleep(tool_s)

    async def run() -> None:
        async with TorchEngine(model, max_sequences=64) as engine, anyio.create_task_group() as tasks:
            for seed, plan in enumerate(plans):
                tasks.start_soon(rollout, engine, seed, plan)

    anyio.run(run)
    tally.cacheable += sum(len(plan.prompt) for index, plan in enumerate(plans) if index % SIBLINGS)


def run_one_at_a_time(model: PreTrainedModel, plans: list[RolloutPlan], tally: Tally, tool_s: float = 0.0) -> None:
    """transformers' `generate`, one rollout after the other."""
    for plan in plans:
        progress, has_next = RolloutProgress(plan), True
        while has_next:
            if has_next := progress.add_turn(_generate(model, [progress.ids], progress.turn_length)[0], tally):
                time.sleep(tool_s)


def run_lock_step(model: PreTrainedModel, plans: list[RolloutPlan], tally: Tally, tool_s: float = 0.0) -> None:
    """transformers' `generate`, turn by turn for all rollouts in one batch."""
    rollouts = [RolloutProgress(plan) for plan in plans]
    for turn in range(TURNS):
        time.sleep(tool_s if turn else 0.0)
        longest = max(rollout.turn_length for rollout in rollouts)
        generated = _generate(model, [rollout.ids for rollout in rollouts], longest)
        for rollout, ids in zip(rollouts, generated, strict=True):
            rollout.add_turn(ids[: rollout.turn_length], tally)


def _generate(model: PreTrainedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Generates with logprobs, which a trainer needs and our engine returns."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
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


def run_continuous_batching(
    model: PreTrainedModel, plans: list[RolloutPlan], tally: Tally, tool_s: float = 0.0
) -> None:
    """transformers' continuous batching, all rollouts concurrently; small pages, since prefixes share whole pages."""
    sampling = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
    config = ContinuousBatchingConfig(
        page_size=32, num_blocks=1024, max_batch_tokens=512, max_requests_per_batch=64, return_logprobs=True
    )
    waiting: deque[tuple[float, RolloutProgress]] = deque((0.0, RolloutProgress(plan)) for plan in plans)
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=config) as requests:
        running: dict[str, RolloutProgress] = {}
        while running or waiting:
            while waiting and waiting[0][0] <= time.perf_counter():
                rollout = waiting.popleft()[1]
                running[requests.add_request(rollout.ids, max_new_tokens=rollout.turn_length)] = rollout
            wait_s = max(0.001, waiting[0][0] - time.perf_counter()) if waiting else TIMEOUT_S
            result = requests.get_result(timeout=wait_s)
            if result is None and waiting:
                continue
            if result is None or result.error:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            rollout = running.pop(result.request_id)
            if rollout.add_turn(result.generated_tokens, tally):
                waiting.append((time.perf_counter() + tool_s, rollout))


ENGINES: dict[str, Callable[[PreTrainedModel, list[RolloutPlan], Tally, float], None]] = {
    "torch engine": run_torch_engine,
    "generate, a rollout at a time": run_one_at_a_time,
    "generate, in lock step": run_lock_step,
    "continuous batching": run_continuous_batching,
}


def measure(name: str, plans: list[RolloutPlan], tool_s: float = 0.0, vocabulary: int = VOCABULARY) -> Tally:
    """Runs one engine on the plans; raises RuntimeError if it generated another number of tokens."""
    tally, model = Tally(), make_model(vocabulary)
    wall, cpu = time.perf_counter(), time.process_time()
    ENGINES[name](model, plans, tally, tool_s)
    tally.wall_s, tally.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    expected = sum(sum(plan.lengths) for plan in plans)
    if tally.tokens != expected:
        raise RuntimeError(f"{name} generated {tally.tokens} tokens, not {expected}")
    return tally


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rollouts", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    torch.set_num_threads(1)
    plans = make_plans(args.rollouts)
    for name in ENGINES:
        measure(name, plans[:2])
    results: dict[str, list[Tally]] = {name: [] for name in ENGINES}
    for _ in range(args.rounds):
        for name in ENGINES:
            results[name].append(measure(name, plans))
    print(f"{args.rollouts} rollouts of {TURNS} turns, one thread, median of {args.rounds}\n")
    print("| engine | tokens/s | tokens per core-second | ours over it | cached of possible |\n|---|--:|--:|--:|--:|")
    ours = median(tally.tokens / tally.cpu_s for tally in results["torch engine"])
    for name, tallies in results.items():
        wall = median(tally.tokens / tally.wall_s for tally in tallies)
        cpu = median(tally.tokens / tally.cpu_s for tally in tallies)
        share = f"{tallies[0].cached / tallies[0].cacheable:.1%}" if tallies[0].cached else ""
        print(f"| {name} | {wall:.0f} | {cpu:.0f} | {ours / cpu:.1f}x | {share} |")


if __name__ == "__main__":
    main()
