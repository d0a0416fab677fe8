"""A model of a known shape, with random weights, rolls out over tools and learns: how quick each half is, how true."""

from __future__ import annotations

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
from anyio import to_thread  # noqa: E402
from gpu_idle import Idle  # noqa: E402
from gpu_peak import computed, operations, peak  # noqa: E402
from gpu_trl import beside  # noqa: E402
from loop import AlwaysCalls  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from gateway.types import Image  # noqa: E402
from tests.trainer.conversations import template_for  # noqa: E402
from tests.trainer.scripts import HERMES, gateway_of  # noqa: E402
from trainer.config import Admission, RolloutLimits  # noqa: E402
from trainer.engine.base import Capabilities, Sampling, Written  # noqa: E402
from trainer.engine.sglang.engine import SGLangEngine  # noqa: E402
from trainer.engine.sglang.own import Own  # noqa: E402
from trainer.engine.sglang.publish.disk import ByDisk  # noqa: E402
from trainer.engine.sglang.publish.group import ByGroup  # noqa: E402
from trainer.engine.sglang.publish.tensors import ByTensors  # noqa: E402
from trainer.engine.sglang.publish.way import Way  # noqa: E402
from trainer.engine.sglang.server import Server  # noqa: E402
from trainer.engine.sglang.wire import Wire  # noqa: E402
from trainer.groups import Group, Groups  # noqa: E402
from trainer.learn.lesson import lesson  # noqa: E402
from trainer.learn.rounds import every  # noqa: E402
from trainer.learn.settings import AlgorithmSettings  # noqa: E402
from trainer.play import Player  # noqa: E402
from trainer.policy.learner import Learner  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402
from trainer.reward.scored import Scored, ScoredGroup  # noqa: E402
from trainer.task import Task  # noqa: E402
from trainer.template import Settings, Template  # noqa: E402
from trainer.view.counts import Counts  # noqa: E402

BESIDE = ("--mem-fraction-static", "0.4")
"""What a server takes of a GPU that the trainer is on as well."""
UPDATES = 3
"""Of which the first is left out: kernels are chosen in it."""
PLAIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int = 151936
    groups: int = 64
    siblings: int = 8
    turns: int = 4
    prompt: int = 1024
    """Tokens that siblings share, more or less."""
    written: int = 128
    reply: int = 256
    """Tokens that a tool answers with, more or less."""

    @property
    def context(self) -> int:
        return 2 * self.prompt + self.turns * (self.written + 2 * self.reply)


SMALL = {"groups": 2, "siblings": 2, "turns": 2, "prompt": 96, "written": 8, "reply": 24}
SHAPES = {
    "whole": (
        Shape("Qwen2.5-0.5B", 896, 24, 14, 4864),
        Shape("Qwen2.5-1.5B", 1536, 28, 12, 8960),
    ),
    "small": (Shape("tiny", 64, 2, 4, 192, 4096, **SMALL),),
}


def model_of(shape: Shape, folder: Path, cuda: bool) -> Path:
    """Qwen2.5's network, with random weights, in the numbers that a server is to compute with."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=2,
        intermediate_size=shape.intermediate,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16 if cuda else torch.float32).save_pretrained(folder)
    return folder


@dataclass
class Fixed:
    """Turns are as long as they are to be, and what was asked is kept, to be asked again without tools."""

    inner: SGLangEngine
    tokens: int
    asked: defaultdict[str, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, key: str = "", group: str = "", images: Sequence[Image] = ()
    ) -> Written:
        self.asked[key].append(tuple(ids))
        exact = replace(sampling, max_tokens=self.tokens, stop_ids=(0,), barred=(0,))
        return replace(await self.inner.generate(ids, exact, key=key, group=group), stop="stop")


@dataclass(frozen=True, slots=True)
class Rolled:
    groups: list[Group]
    seen: Any
    wall_s: float
    asked: Mapping[str, list[tuple[int, ...]]]


async def worked(server: Server, model: Path, shape: Shape, cuda: bool) -> dict[str, Any]:
    """Rollouts, the same without tools, updates, and each way to publish; in the order in which a step has them."""
    server.options = replace(server.options, more=(*server.options.more, *(BESIDE if cuda else ())))
    policy = await to_thread.run_sync(Policy.load, model, UpdateSettings(lr=1e-6))
    async with SGLangEngine([server], ByTensors(), own=Own(policy.finds, policy.filed, policy.eyes)) as engine:
        await engine.publish(policy.weights, 1)
        await rolled(engine, replace(shape, groups=1), "warm")
        with Idle() as rolling:
            whole = await rolled(engine, shape, "whole")
        plain_s = await plain(server.url, whole.asked, shape)
        learner = Learner(policy, AlgorithmSettings(name="dapo"), exact=engine.capabilities.exact)
        with Idle() as learning:
            learned, update_s = await to_thread.run_sync(updated, learner, whole.groups)
        theirs = await to_thread.run_sync(
            beside, model, learner.weighed, shape.siblings, policy.settings, UPDATES, _tokens(whole)
        )
        ways: tuple[Way, ...] = (ByTensors(), ByDisk(model), ByGroup())
        with Idle() as publishing:
            published_s = {f"publish_{way.name}_s": await published(server.url, way, policy) for way in ways}
    tokens = _tokens(whole)
    return {
        "rollout_tokens_per_s": whole.seen.written / whole.wall_s,
        "plain_tokens_per_s": whole.seen.written / plain_s,
        "of_plain": plain_s / whole.wall_s,
        "cached_of_possible": whole.seen.cached / max(1, whole.seen.possible),
        "update_tokens_per_s": tokens / update_s,
        **arithmetic(policy, learner, tokens, update_s),
        "update_grad_norm": learned.get("update/grad_norm"),
        **theirs,
        "update_of_trl": tokens / update_s / theirs["trl_update_tokens_per_s"] if "trl" in theirs else None,
        **published_s,
        "mismatch_mean": learned.get("mismatch/mean"),
        "mismatch_max": learned.get("mismatch/max"),
        "mismatch_kl": learned.get("mismatch/kl"),
        "idle_rolling_out": rolling.share,
        "idle_learning": learning.share,
        "idle_publishing": publishing.share,
        "rollouts": shape.groups * shape.siblings,
        "weights": sum(weight.numel() for weight in policy.model.parameters()),
    }


def arithmetic(policy: Policy, learner: Learner, tokens: int, update_s: float) -> dict[str, float | None]:
    """Of an update, by what it computes: of so many tokens, siblings share some."""
    nodes, drawn = computed(learner.weighed, policy.settings.tokens, bool(policy.reader.note))
    done, most = operations(policy, nodes, drawn) / update_s, peak()
    return {"computed": nodes / tokens, "update_flops": done, "share_of_peak": done / most if most else None}


def _tokens(rolled: Rolled) -> int:
    return sum(len(one.ledger) for group in rolled.groups for one in group.rollouts)


async def rolled(engine: SGLangEngine, shape: Shape, name: str) -> Rolled:
    """The whole loop: template, parser, gateway, and a tool that answers at once."""
    template = template_for(HERMES, Settings(sanity="disable"))  # Chance never writes as a template would.
    reply = worded(template, shape.reply)

    async def work() -> str:
        """Works."""
        return reply

    fixed, counts = Fixed(engine, shape.written), Counts()
    limits = RolloutLimits(assistant_turns=shape.turns, tool_calls=shape.turns, rollout_tokens=shape.context)
    many = shape.groups * shape.siblings
    async with gateway_of(work, at_once=4096) as gateway:
        player = Player(fixed, template, gateway, limits, stepper=AlwaysCalls(), watch=counts)  # type: ignore[arg-type]
        groups = Groups(player, shape.siblings, admission=Admission(open=many, writing=many))
        opening = worded(template, shape.prompt)
        tasks = [Task(f"{name}-{number}", ({"role": "user", "content": f"{number} {opening}"},))
                 for number in range(shape.groups)]  # fmt: skip
        began = time.perf_counter()
        async with groups.play(tasks, name=f"{name}-") as playing:
            done = [group async for group in playing]
        wall_s = time.perf_counter() - began
    failed = [one for group in done for one in group.failed]
    if failed or sum(len(group.rollouts) for group in done) != many:
        raise RuntimeError(f"{len(failed)} rollouts failed: {failed[0].reason if failed else 'some are missing'}")
    return Rolled(done, counts.seen(), wall_s, fixed.asked)


def worded(template: Template, tokens: int) -> str:
    """So many tokens, more or less."""
    word = "work goes on "
    return word * max(1, tokens // len(template.tokens.encode(word)))


async def plain(url: str, asked: Mapping[str, list[tuple[int, ...]]], shape: Shape) -> float:
    """Seconds for the same requests, each rollout's one after the other, with nothing of ours between them."""
    params = {"max_new_tokens": shape.written, "temperature": 1.0, "ignore_eos": True}

    async def play(turns: Sequence[tuple[int, ...]]) -> None:
        for ids in turns:
            body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "extra_key": "plain"}
            await wire.post("/generate", body, within=PLAIN_S)

    async with Wire(url) as wire:
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for turns in asked.values():
                tasks.start_soon(play, turns)
        return time.perf_counter() - began


def updated(learner: Learner, groups: Sequence[Group]) -> tuple[dict[str, float], float]:
    """What the first told, and the seconds of one of the others."""
    draw = random.Random(0)
    scored = []
    for group in groups:
        each = []
        for place, one in enumerate(group.rollouts):
            reward = float(place % 2) if place < 2 else float(draw.random() < 0.5)
            each.append(Scored(one, {}, reward, (0.0,) * len(one.turns), reward == 1.0))
        scored.append(ScoredGroup(group.task, tuple(each)))
    made = lesson(scored, AlgorithmSettings(name="dapo"), every)
    told = learner.learn(made)
    began = time.perf_counter()
    for _ in range(UPDATES - 1):
        learner.learn(made)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return told, (time.perf_counter() - began) / (UPDATES - 1)


async def published(url: str, way: Way, policy: Policy) -> float:
    """Seconds, of the second time: the first makes what is needed for it."""
    async with SGLangEngine([url], way, own=Own(policy.finds, policy.filed, policy.eyes)) as engine:
        await engine.publish(policy.weights, 1)
        began = time.perf_counter()
        await engine.publish(policy.weights, 2)
        return time.perf_counter() - began
