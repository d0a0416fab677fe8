"""Rollouts, updates and weight sync on a GPU with a random model of a real shape, against SGLang alone and TRL."""

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
from gpu_flops import count_computed, peak_flops, update_flops  # noqa: E402
from gpu_idle import GpuIdleMeter  # noqa: E402
from gpu_trl import measure_trl_update  # noqa: E402
from rollout_loop import AlwaysCalls  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from gateway.types import Image  # noqa: E402
from tests.trainer.conversations import make_template  # noqa: E402
from tests.trainer.policy_scripts import HERMES, make_gateway  # noqa: E402
from trainer.algorithms.settings import AlgorithmSettings  # noqa: E402
from trainer.algorithms.token_weights import weigh_all_turns  # noqa: E402
from trainer.algorithms.train_batch import build_train_batch  # noqa: E402
from trainer.engine.base import Capabilities, Generation, OnIds, Sampling  # noqa: E402
from trainer.engine.sglang.http_client import SGLangClient  # noqa: E402
from trainer.engine.sglang.server_process import ServerProcess  # noqa: E402
from trainer.engine.sglang.sglang_engine import SGLangEngine  # noqa: E402
from trainer.engine.sglang.weight_sync.base import WeightSync  # noqa: E402
from trainer.engine.sglang.weight_sync.disk import DiskSync  # noqa: E402
from trainer.engine.sglang.weight_sync.process_group import ProcessGroupSync  # noqa: E402
from trainer.engine.sglang.weight_sync.tensors import TensorSync  # noqa: E402
from trainer.engine.sglang.weight_sync.verify import TrainerReference  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402
from trainer.policy.update import PolicyUpdater  # noqa: E402
from trainer.reward.scorer import ScoredGroup, ScoredRollout  # noqa: E402
from trainer.rollout.admission import Admission  # noqa: E402
from trainer.rollout.loop import RolloutRunner  # noqa: E402
from trainer.rollout.scheduler import Group, Scheduler  # noqa: E402
from trainer.rollout.settings import ConcurrencySettings, RolloutLimits  # noqa: E402
from trainer.rollout.task import Task  # noqa: E402
from trainer.template import Settings, Template  # noqa: E402
from trainer.view.counters import RolloutCounters  # noqa: E402

COLOCATED_OPTIONS = ("--mem-fraction-static", "0.4")
"""Limits a server's share of a GPU that the trainer uses too."""
UPDATES = 3
"""The first is not counted: kernels are selected in it."""
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
    groups: int = 64
    siblings: int = 8
    turns: int = 4
    prompt: int = 1024
    """Tokens that siblings share, approximately."""
    written: int = 128
    """Tokens of a turn."""
    reply: int = 256
    """Tokens of a tool's reply, approximately."""

    @property
    def context(self) -> int:
        return 2 * self.prompt + self.turns * (self.written + 2 * self.reply)


SMALL = {"groups": 2, "siblings": 2, "turns": 2, "prompt": 96, "written": 8, "reply": 24}
SHAPES = {
    "whole": (
        ModelShape("Qwen2.5-0.5B", 896, 24, 14, 4864),
        ModelShape("Qwen2.5-1.5B", 1536, 28, 12, 8960),
    ),
    "small": (ModelShape("tiny", 64, 2, 4, 192, 4096, **SMALL),),
}


def build_random_model(shape: ModelShape, folder: Path, cuda: bool) -> Path:
    """Saves a Qwen2.5 network with random weights, in the precision that a server computes with."""
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
class RecordingEngine:
    """An engine with turns of fixed length that records its requests, to repeat them without tools."""

    inner: SGLangEngine
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


async def measure_shape(server: ServerProcess, model: Path, shape: ModelShape, cuda: bool) -> dict[str, Any]:
    """Rollouts, the same requests without tools, updates, and each kind of weight sync."""
    server.options = replace(server.options, extra=(*server.options.extra, *(COLOCATED_OPTIONS if cuda else ())))
    policy = await to_thread.run_sync(Policy.load, model, UpdateSettings(lr=1e-6))
    async with SGLangEngine([server], TensorSync(), reference=_reference(policy)) as engine:
        await engine.publish(policy.weights, 1)
        await run_rollouts(engine, replace(shape, groups=1), "warm")
        with GpuIdleMeter() as rollout_meter:
            run = await run_rollouts(engine, shape, "whole")
        plain_s = await repeat_requests(server.url, run.requests, shape)
        updater = PolicyUpdater(policy, AlgorithmSettings(name="dapo"), exact=engine.capabilities.is_exact)
        with GpuIdleMeter() as update_meter:
            metrics, update_s = await to_thread.run_sync(run_updates, updater, run.groups)
        trl = await to_thread.run_sync(
            measure_trl_update, model, updater.last_rows, shape.siblings, policy.settings, UPDATES, run.tokens
        )
        syncs: tuple[WeightSync, ...] = (TensorSync(), DiskSync(model), ProcessGroupSync())
        with GpuIdleMeter() as publish_meter:
            publish_s = {f"publish_{sync.name}_s": await measure_publish(server.url, sync, policy) for sync in syncs}
    return {
        "rollout_tokens_per_s": run.counters.written / run.wall_s,
        "plain_tokens_per_s": run.counters.written / plain_s,
        "of_plain": plain_s / run.wall_s,
        "cached_of_possible": run.counters.cached / max(1, run.counters.possible),
        "update_tokens_per_s": run.tokens / update_s,
        **compute_utilization(policy, updater, run.tokens, update_s),
        "update_grad_norm": metrics.get("update/grad_norm"),
        **trl,
        "update_of_trl": run.tokens / update_s / trl["trl_update_tokens_per_s"] if "trl" in trl else None,
        **publish_s,
        "mismatch_mean": metrics.get("mismatch/mean"),
        "mismatch_max": metrics.get("mismatch/max"),
        "mismatch_kl": metrics.get("mismatch/kl"),
        "idle_rolling_out": rollout_meter.idle_share,
        "idle_learning": update_meter.idle_share,
        "idle_publishing": publish_meter.idle_share,
        "rollouts": shape.groups * shape.siblings,
        "weights": sum(weight.numel() for weight in policy.model.parameters()),
    }


def _reference(policy: Policy) -> TrainerReference:
    return TrainerReference(policy.compute_logprobs, policy.checkpoint_tensors, policy.image_processor)


def compute_utilization(
    policy: Policy, updater: PolicyUpdater, tokens: int, update_s: float
) -> dict[str, float | None]:
    """The share of tokens that an update computes, its FLOPs per second, and their share of the GPU's peak."""
    share_prefixes = not policy.logprob_reader.fallback_reason
    layer_tokens, logit_tokens = count_computed(updater.last_rows, policy.settings.tokens, share_prefixes)
    flops, peak = update_flops(policy, layer_tokens, logit_tokens) / update_s, peak_flops()
    return {"computed": layer_tokens / tokens, "update_flops": flops, "share_of_peak": flops / peak if peak else None}


async def run_rollouts(engine: SGLangEngine, shape: ModelShape, name: str) -> RolloutRun:
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
        scheduler = Scheduler(
            runner,
            shape.siblings,
            admission=Admission(ConcurrencySettings(inflight_rollouts=total, running_requests=total)),
        )
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


def run_updates(updater: PolicyUpdater, groups: Sequence[Group]) -> tuple[dict[str, float], float]:
    """The metrics of the first update, and the mean seconds of the others; rewards are random."""
    rng = random.Random(0)
    scored_groups = []
    for group in groups:
        scored = []
        for index, rollout in enumerate(group.rollouts):
            reward = float(index % 2) if index < 2 else float(rng.random() < 0.5)
            scored.append(ScoredRollout(rollout, {}, reward, (0.0,) * len(rollout.turns), reward == 1.0))
        scored_groups.append(ScoredGroup(group.task, tuple(scored)))
    batch = build_train_batch(scored_groups, AlgorithmSettings(name="dapo"), weigh_all_turns)
    metrics = updater.train_step(batch)
    began = time.perf_counter()
    for _ in range(UPDATES - 1):
        updater.train_step(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return metrics, (time.perf_counter() - began) / (UPDATES - 1)


async def measure_publish(url: str, sync: WeightSync, policy: Policy) -> float:
    """Seconds of the second weight sync: the first one sets up what later ones reuse."""
    async with SGLangEngine([url], sync, reference=_reference(policy)) as engine:
        await engine.publish(policy.weights, 1)
        began = time.perf_counter()
        await engine.publish(policy.weights, 2)
        return time.perf_counter() - began
