"""Models of real shapes with random weights, rollouts with them, and the batches that they would be."""

from __future__ import annotations

import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import anyio  # noqa: E402
import torch  # noqa: E402
from rollout_loop import AlwaysCalls  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from gateway.types import Image  # noqa: E402
from tests.trainer.conversations import make_template  # noqa: E402
from tests.trainer.policy_scripts import HERMES, make_gateway  # noqa: E402
from trainer.algorithms.train_batch import TrainBatch, TrainSequence  # noqa: E402
from trainer.engine.base import Capabilities, Engine, Generation, OnIds, Sampling  # noqa: E402
from trainer.engine.sglang.http_client import SGLangClient  # noqa: E402
from trainer.rollout.admission import Admission  # noqa: E402
from trainer.rollout.loop import RolloutRunner  # noqa: E402
from trainer.rollout.scheduler import Group, Scheduler  # noqa: E402
from trainer.rollout.settings import ConcurrencySettings, RolloutLimits  # noqa: E402
from trainer.rollout.task import Task  # noqa: E402
from trainer.template import Settings, Template  # noqa: E402
from trainer.view.counters import RolloutCounters  # noqa: E402

PLAIN_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, and of the rollouts with it."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 151936
    kv_heads: int = 2
    groups: int = 16
    siblings: int = 8
    turns: int = 3
    prompt: int = 1024
    """Tokens that siblings share, approximately."""
    written: int = 128
    """Tokens of a turn."""
    reply: int = 256
    """Tokens of a tool's reply, approximately."""

    @property
    def context(self) -> int:
        return 2 * self.prompt + self.turns * (self.written + 2 * self.reply)


SHAPES = {
    "tiny": ModelShape("tiny", 64, 2, 4, 192, 4096, groups=2, siblings=2, turns=2, prompt=96, written=8, reply=24),
    "0.5B": ModelShape("0.5B", 896, 24, 14, 4864),
    "1.5B": ModelShape("1.5B", 1536, 28, 12, 8960),
}
"""The larger two are Qwen2.5's."""


def build_random_model(shape: ModelShape, folder: Path, cuda: bool) -> Path:
    """Saves a Qwen2.5 network with random weights, in the precision that a server computes with, unless it is there."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16 if cuda else torch.float32).save_pretrained(folder)
    return folder


@dataclass
class RecordingEngine:
    """An engine with turns of fixed length that records its requests, to repeat them without tools."""

    inner: Engine
    turn_tokens: int
    requests: defaultdict[str, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def generate(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        key: str = "",
        group: str = "",
        images: Sequence[Image] = (),
        on_ids: OnIds | None = None,
    ) -> Generation:
        self.requests[key].append(tuple(ids))
        exact = replace(sampling, max_tokens=self.turn_tokens, stop_ids=(0,), banned_ids=(0,))
        return replace(await self.inner.generate(ids, exact, key=key, group=group, on_ids=on_ids), finish_reason="stop")


@dataclass(frozen=True, slots=True)
class RolloutRun:
    """Finished rollouts and their requests."""

    groups: list[Group]
    counters: Any
    wall_s: float
    requests: Mapping[str, list[tuple[int, ...]]]

    @property
    def tokens(self) -> int:
        return sum(len(rollout.ledger) for group in self.groups for rollout in group.rollouts)


async def run_rollouts(engine: Engine, shape: ModelShape, name: str) -> RolloutRun:
    """Runs the whole rollout loop: template, parser, gateway, and a tool that answers at once."""
    template = make_template(
        HERMES, Settings(sanity="disable")
    )  # A random model never generates what a template renders.
    reply = make_text(template, shape.reply)

    async def work() -> str:
        """Works."""
        return reply

    recorder, counters = RecordingEngine(engine, shape.written), RolloutCounters()
    limits = RolloutLimits(assistant_turns=shape.turns, tool_calls=shape.turns, rollout_tokens=shape.context)
    total = shape.groups * shape.siblings
    async with make_gateway(work, at_once=4096) as gateway:
        runner = RolloutRunner(recorder, template, gateway, limits, stepper=AlwaysCalls(), observer=counters)  # type: ignore[arg-type]
        admission = Admission(ConcurrencySettings(inflight_rollouts=total, running_requests=total))
        scheduler = Scheduler(runner, shape.siblings, admission=admission)
        opening = make_text(template, shape.prompt)
        tasks = [Task(f"{name}-{number}", ({"role": "user", "content": f"{number} {opening}"},))
                 for number in range(shape.groups)]  # fmt: skip
        began = time.perf_counter()
        async with scheduler.submit(tasks, name=f"{name}-") as submitted:
            groups = [group async for group in submitted]
        wall_s = time.perf_counter() - began
    failed = [rollout for group in groups for rollout in group.failed]
    if failed or sum(len(group.rollouts) for group in groups) != total:
        raise RuntimeError(f"{len(failed)} rollouts failed: {failed[0].reason if failed else 'some are missing'}")
    return RolloutRun(groups, counters.snapshot(), wall_s, recorder.requests)


def make_text(template: Template, tokens: int) -> str:
    """A text of approximately this many tokens."""
    phrase = "work goes on "
    return phrase * max(1, tokens // len(template.tokenizer.encode(phrase)))


def make_requests(shape: ModelShape, count: int) -> dict[str, list[tuple[int, ...]]]:
    """Prompts that have nothing in common, one for each sequence."""
    rng = random.Random(0)
    return {
        str(number): [tuple(rng.randrange(1, shape.vocabulary) for _ in range(shape.prompt))] for number in range(count)
    }


async def repeat_requests(url: str, requests: Mapping[str, list[tuple[int, ...]]], shape: ModelShape) -> float:
    """Seconds for the same requests sent to SGLang directly, each rollout's one after the other."""
    params = {"max_new_tokens": shape.written, "temperature": 1.0, "ignore_eos": True}

    async def repeat_rollout(turns: Sequence[tuple[int, ...]]) -> None:
        for ids in turns:
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "extra_key": "plain"}
            await client.post("/generate", body, within=PLAIN_TIMEOUT_S)

    async with SGLangClient(url) as client:
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for turns in requests.values():
                tasks.start_soon(repeat_rollout, turns)
        return time.perf_counter() - began


def make_batch(shape: ModelShape) -> TrainBatch:
    """The batch that these rollouts would be: siblings share the prompt, tools wrote the replies."""
    rng = random.Random(0)
    sequences, rewards = [], []
    for _ in range(shape.groups):
        prompt = [rng.randrange(shape.vocabulary) for _ in range(shape.prompt)]
        for sibling in range(shape.siblings):
            ids, mask, turns = list(prompt), [False] * shape.prompt, [-1] * shape.prompt
            for turn in range(shape.turns):
                written, reply = rng.randint(shape.written // 2, shape.written), rng.randint(1, shape.reply)
                ids += [rng.randrange(shape.vocabulary) for _ in range(written + reply)]
                mask += [True] * written + [False] * reply
                turns += [turn] * written + [-1] * reply
            logprobs = [-math.log(shape.vocabulary) * is_written for is_written in mask]
            number = len(sequences)
            weights = list(map(float, mask))
            sequences.append(TrainSequence(f"rollout {number}", number, ids, mask, logprobs, weights, turns))
            rewards.append(float(sibling % 2 if sibling < 2 else rng.random() < 0.5))  # no group without a lesson
    return TrainBatch(
        tuple(sequences),
        tuple(sequence.name for sequence in sequences),
        tuple(number // shape.siblings for number in range(len(sequences))),
        tuple(rewards),
        tuple((0.0,) * shape.turns for _ in sequences),
        groups_with_signal=frozenset(range(shape.groups)),
    )
