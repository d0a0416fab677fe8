"""KL between an engine and the trainer by turn, where each turn is short: words are counted, page after page.

A bug in positions, caches or templates that is small in the first turn shows as KL that grows from turn to turn.
`python bench/real_model.py --only turns` measures all engines.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from gateway.gateway import Gateway
from trainer.engine.base import Engine, Sampling
from trainer.engine.sglang.launch import TESTED
from trainer.engine.sglang.server_process import ServerOptions, ServerProcess
from trainer.engine.sglang.sglang_engine import SGLangEngine
from trainer.engine.sglang.weight_sync.tensors import TensorSync
from trainer.engine.torch.torch_engine import TorchEngine
from trainer.model import load_model
from trainer.policy.policy import Policy
from trainer.policy.settings import UpdateSettings
from trainer.rollout.loop import RolloutRunner
from trainer.rollout.rollout import Rollout
from trainer.rollout.settings import RolloutLimits, TemplateSettings
from trainer.rollout.steppers import Step, Turn
from trainer.rollout.task import Task
from trainer.setup import load_template
from trainer.template import Template

WORDS = ("river", "stone", "lamp", "window", "garden", "letter", "bridge", "winter", "music", "paper", "silver")
ENDS = (".", "\n", "\n\n", ",")
"""What ends a turn of a real model, which would go on to the limit."""
BIN = 5
"""Turns in a column of the table."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is played."""

    rollouts: int = 4
    turns: int = 30
    words: int = 8
    """Words of a page."""
    turn_tokens: int = 96


@dataclass(frozen=True)
class Pages:
    """A stepper that shows the next page after each turn, and asks how often a word has stood there."""

    size: Size

    def open(self, number: int) -> Task:
        """A rollout's task, which begins with the first page."""
        return Task(str(number), ({"role": "user", "content": self._page(str(number), 0)},))

    def check_finished(self, turn: Turn) -> bool:
        return turn.number >= self.size.turns

    def step(self, turn: Turn) -> Step:
        return Step(messages=({"role": "user", "content": self._page(turn.task.id, turn.number)},))

    def _page(self, name: str, number: int) -> str:
        words = random.Random(f"{name}/{number}").choices(WORDS, k=self.size.words)
        return (
            f"Page {number + 1}: {' '.join(words)}.\nHow often has {WORDS[int(name) % len(WORDS)]} stood here so far?"
        )


async def play(engine: Engine, template: Template, size: Size, stop_ids: Sequence[int]) -> list[Rollout]:
    """The rollouts, all at once. Turns end with one of these ids, too: a model that goes on to the limit of a turn
    has no further one."""
    pages, rollouts = Pages(size), list[Rollout]()
    turns = {"assistant_turns": size.turns + 1, "user_turns": size.turns, "turn_tokens": size.turn_tokens}
    limits = RolloutLimits(**turns, rollout_tokens=10**6, timeout_s=3600)
    runner = RolloutRunner(engine, template, Gateway([]), limits, Sampling(stop_ids=tuple(stop_ids)), pages)

    async def run(number: int) -> None:
        rollouts.append(await runner.run(pages.open(number), group=str(number)))

    async with runner.gateway, anyio.create_task_group() as tasks:
        for number in range(size.rollouts):
            tasks.start_soon(run, number)
    if lost := next((rollout for rollout in rollouts if rollout.stop.is_infrastructure), None):
        raise RuntimeError(f"a rollout was lost: {lost.stop}: {lost.reason}")
    return rollouts


def compare(
    rollouts: Sequence[Rollout], compute_logprobs: Callable[[Sequence[int]], Sequence[float]]
) -> list[dict[str, float]]:
    """For each turn: KL as `trainer.algorithms.loss` measures it (k3), and the largest difference, in nats."""
    by_turn: list[list[float]] = []
    for rollout in rollouts:
        ledger = rollout.ledger
        trainer = [0.0, *compute_logprobs(ledger.ids)]
        written = [pair for pair in zip(ledger.starts, ledger.entries, strict=True) if pair[1].logprobs is not None]
        by_turn += [[] for _ in written[len(by_turn) :]]
        for logs, (start, entry) in zip(by_turn, written, strict=False):
            logs += [own - its for own, its in zip(trainer[start:], entry.logprobs or (), strict=False)]
    return [
        {"kl": fmean(exp(log) - 1 - log for log in logs), "max": max(map(abs, logs)), "tokens": len(logs)}
        for logs in by_turn
    ]


async def measure_turns(folder: Path, size: Size = Size()) -> dict[str, Any]:
    """KL by turn of each engine that has the model of this folder."""
    policy, template = Policy.load(folder, UpdateSettings()), load_template(folder, TemplateSettings())
    stop_ids = [ids[0] for text in ENDS if len(ids := template.tokenizer.encode(text)) == 1]
    context = size.turns * (3 * size.words + size.turn_tokens + 64)
    server = ServerOptions(context=min(context, 8192), cache_tokens=65536)
    engines = {
        "embedded": _open_embedded(folder),
        "SGLang": _open_sglang(folder, server),
        "SGLang, bfloat16": _open_sglang(folder, replace(server, extra=("--dtype", "bfloat16"))),
    }
    found = {}
    for name, opening in engines.items():
        async with opening as engine:
            rollouts = await play(engine, template, size, stop_ids)
        found[name] = fold(compare(rollouts, policy.compute_logprobs))
        print(name, found[name], flush=True)
    return {"size": asdict(size), "turns": found, "versions": f"SGLang {TESTED[0]}"}


@asynccontextmanager
async def _open_embedded(folder: Path) -> AsyncIterator[Engine]:
    async with TorchEngine(load_model(folder), deterministic=False) as engine:
        yield engine


@asynccontextmanager
async def _open_sglang(folder: Path, options: ServerOptions) -> AsyncIterator[Engine]:
    with TemporaryDirectory() as place:
        async with SGLangEngine([ServerProcess(folder, options, log=Path(place) / "log")], TensorSync()) as engine:
            yield engine


def fold(turns: Sequence[Mapping[str, float]]) -> list[float]:
    """The mean KL of the tokens of a few turns, of the next few, and so on, in two digits."""
    parts = [turns[start : start + BIN] for start in range(0, len(turns), BIN)]
    tokens = (max(1, sum(turn["tokens"] for turn in part)) for part in parts)
    kls = (sum(turn["kl"] * turn["tokens"] for turn in part) for part in parts)
    return [float(f"{kl / many:.1e}") for kl, many in zip(kls, tokens, strict=True)]


def format_turns(found: Mapping[str, Sequence[float]]) -> str:
    """A table with a row for each engine."""
    starts = range(1, max(map(len, found.values())) * BIN, BIN)
    heads = [f"{start}-{start + BIN - 1}" for start in starts]
    lines = [f"| KL, turns | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
    lines += [f"| {name} | {' | '.join(f'{kl:.1e}' for kl in kls)} |" for name, kls in found.items()]
    return "\n".join(lines)
