"""The parts of the GPU benchmark, each run by `gpu.py` as a process of its own: `python bench/gpu_parts.py PART ...`.

A part prints each figure as a line of JSON the moment it exists, so that whatever ends the part later costs none.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import anyio  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from gpu_flops import count_computed, peak_flops, update_flops  # noqa: E402
from gpu_idle import GpuIdleMeter, read_used_memory  # noqa: E402
from gpu_trl import find_trl, measure_trl_update  # noqa: E402
from gpu_workload import (  # noqa: E402
    SHAPES,
    ModelShape,
    RolloutRun,
    build_random_model,
    make_batch,
    make_requests,
    repeat_requests,
    run_rollouts,
)
from rich.console import Console  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.varlen import varlen_attn  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from mtrl_plugins.demo.facts.facts_tasks import draw_problems  # noqa: E402
from trainer.algorithms.settings import AlgorithmSettings  # noqa: E402
from trainer.engine.base import Engine, Sampling  # noqa: E402
from trainer.engine.sglang.sglang_engine import SGLangEngine  # noqa: E402
from trainer.engine.sglang.weight_sync.base import WeightSync  # noqa: E402
from trainer.engine.sglang.weight_sync.disk import DiskSync  # noqa: E402
from trainer.engine.sglang.weight_sync.process_group import ProcessGroupSync  # noqa: E402
from trainer.engine.sglang.weight_sync.tensors import TensorSync  # noqa: E402
from trainer.engine.sglang.weight_sync.verify import TrainerReference  # noqa: E402
from trainer.engine.torch.torch_engine import STEPS_AHEAD, TorchEngine  # noqa: E402
from trainer.engine.torch.weights import Holding  # noqa: E402
from trainer.model import load_model  # noqa: E402
from trainer.policy.flex_forest import arrange_in_pre_order  # noqa: E402
from trainer.policy.memory_parts import UPDATE  # noqa: E402
from trainer.policy.memory_plan import plan_memory, total_memory  # noqa: E402
from trainer.policy.placement import server_reserve  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import PolicyError, UpdateSettings  # noqa: E402
from trainer.policy.update import PolicyUpdater  # noqa: E402
from trainer.storage.run_files import read_run_info  # noqa: E402
from trainer.train.run_folder import load_run_settings  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
GIB = 2**30
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MICRO_BATCHES = (8192, 32768)
KERNEL_ROWS = tuple((tokens, row) for tokens in MICRO_BATCHES for row in (1024, tokens))
"""Tokens, and those of a row."""
KERNEL_TOLERANCE = 1e-2
"""Of the largest output, by which two kernels may differ."""
LAYERS = 8
"""Passes without a wait for the device between them, as of a model's layers."""
UPDATES = 2
"""After a first one, in which kernels are chosen."""
PUBLISHES = 3
AT_ONCE, SMALL_AT_ONCE = 64, 4
"""Sequences of one turn, generated at once by SGLang and by the embedded engine."""
SERVER_DTYPE = ("--dtype", "bfloat16") if CUDA else ()
"""The trainer's: SGLang takes float16 for a model whose files are in float32."""
PLACEMENTS = ("together", "beside")
TINY_JOB = {"prompts": 4, "n": 4, "evaluation": {"every": 0, "after": False}}


def tell(figure: str, value: float | str | bool | None, unit: str = "", **labels: Any) -> None:
    """Prints a figure at once; None is one that this machine has none of."""
    if value is not None:
        rounded = float(f"{value:.5g}") if isinstance(value, float) else value
        print(json.dumps({"figure": figure, "value": rounded, "unit": unit} | labels), flush=True)


def skip(figure: str, reason: str, **labels: Any) -> None:
    """Says why a figure is missing."""
    print(json.dumps({"figure": figure, "skipped": reason} | labels), flush=True)


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """The median time of some work on the device, after a first time that is not counted."""
    taken = []
    for _ in range(times + 1):
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def measure_matmul(arguments: argparse.Namespace) -> float:
    """FLOPs per second of a matrix product, of which the others are shares."""
    side = 256 if arguments.small else 8192
    a, b = (torch.randn(side, side, device=DEVICE, dtype=DTYPE) for _ in range(2))
    matmul = 2 * side**3 / seconds(lambda: a @ b)
    tell("matmul", matmul / 1e12, "TFLOP/s", side=side)
    return matmul


def measure_floors(arguments: argparse.Namespace) -> None:
    """What the card itself does: a matrix product and a copy."""
    measure_matmul(arguments)
    mib = 4 if arguments.small else 4096
    block = torch.randn(mib * 2**18, device=DEVICE)
    target = torch.empty_like(block)
    tell("copy", 2 * block.nbytes / seconds(lambda: target.copy_(block)) / 1e9, "GB/s", mib=mib)


def measure_kernels(arguments: argparse.Namespace) -> None:
    """A layer's attention over rows that share nothing, forward and backward, by each kernel: ours for forests, flash
    attention for rows of any length, and torch's. Raises RuntimeError if two compute different things."""
    shape, matmul = SHAPES[arguments.shape], measure_matmul(arguments)
    tries, rows = (1, ((256, 64), (256, 256))) if arguments.small else (LAYERS, KERNEL_ROWS)
    wrong = []
    for tokens, row in rows:
        size = shape.hidden // shape.heads
        inputs = [torch.randn(tokens, count * size, device=DEVICE, dtype=DTYPE) for count in head_counts(shape)]
        gradient, first = torch.randn_like(inputs[0]), []
        for name, attend in attention_kernels(shape, tokens, row).items():
            backward = CUDA or name != "ours"  # Which torch can't differentiate on a CPU.
            labels = {"kernel": name, "tokens": tokens, "row": row, "backward": backward}
            attended = partial(run_passes, attend, [tensor.requires_grad_(backward) for tensor in inputs], gradient)
            with _told_if_it_fails("attention", **labels):
                taken, found = seconds(lambda: [attended() for _ in range(tries)]) / tries, attended()  # noqa: B023
                flops = (7 if backward else 2) * tokens * row * shape.heads * size  # Causal: half of the square.
                tell("attention", taken * 1e3, "ms", **labels)
                tell("of the card's matmul", flops / taken / matmul, **labels)
                first = first or found
                apart = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, first, strict=False)]
                tell("apart, of the largest value", max(apart), **labels)
                if not apart[0] <= KERNEL_TOLERANCE:
                    wrong.append(labels)
    if wrong:
        raise RuntimeError(f"outputs differ by more than {KERNEL_TOLERANCE}: {wrong}")


def run_passes(attend: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """The output, and the inputs' gradients where they have one."""
    output = attend(*inputs)
    gradients = torch.autograd.grad(output, inputs, gradient) if output.requires_grad else ()
    return [output.detach(), *gradients]


def head_counts(shape: ModelShape) -> tuple[int, int, int]:
    """Heads of queries, keys and values."""
    return shape.heads, shape.kv_heads, shape.kv_heads


def attention_kernels(shape: ModelShape, tokens: int, row: int) -> dict[str, Callable[..., Tensor]]:
    """Causal attention within rows of one length, by kernel; the axes of inputs and outputs are token and width."""
    counts = head_counts(shape)
    starts = torch.arange(0, tokens + 1, row, device=DEVICE, dtype=torch.int32)
    parents = [-1 if token % row == 0 else token - 1 for token in range(tokens)]
    order = arrange_in_pre_order(parents, torch.arange(tokens, device=DEVICE) % row)
    # torch 2.11 takes fewer heads of keys without saying so.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}

    def split(inputs: Sequence[Tensor], *axes: int) -> list[Tensor]:
        return [tensor.view(*axes, count, -1) for tensor, count in zip(inputs, counts, strict=True)]

    def attend_ours(*inputs: Tensor) -> Tensor:
        return order.attend(inputs, counts, None, None)[:tokens]

    def attend_varlen(*inputs: Tensor) -> Tensor:
        heads = split(inputs, tokens)
        return varlen_attn(*heads, starts, starts, row, row, window_size=(-1, 0), **grouped).flatten(1)

    def attend_torch(backend: SDPBackend, *inputs: Tensor) -> Tensor:
        heads = (tensor.transpose(1, 2) for tensor in split(inputs, tokens // row, row))
        with sdpa_kernel(backend):
            output = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2).reshape(tokens, -1)

    kernels = {name: partial(attend_torch, backend) for name, backend in KERNELS.items()}
    return {"ours": attend_ours, "varlen": attend_varlen} | kernels


def _reference(policy: Policy) -> TrainerReference:
    return TrainerReference(policy.compute_logprobs, policy.checkpoint_tensors, policy.image_processor)


async def check_gates(arguments: argparse.Namespace) -> None:
    """Whether the server takes the trainer's weights, and how far its logprobs are from the trainer's."""
    policy = Policy.load(arguments.model, UpdateSettings())
    async with SGLangEngine([arguments.url], TensorSync(), reference=_reference(policy)) as engine:
        tell("engine", engine.capabilities.name)
        await engine.publish(policy.weights, 1)
        agreement = engine.agreement
        assert agreement is not None
        tell("logprobs apart, mean", agreement.mean_difference, "nats")
        tell("logprobs apart, most", agreement.max_difference, "nats")


async def tell_rollouts(engine: Engine, shape: ModelShape, at_once: int) -> RolloutRun:
    """Runs the rollout loop of a shape, after a group that warms the engine up."""
    await run_rollouts(engine, replace(shape, groups=1), "warm")
    with GpuIdleMeter() as meter:
        run = await run_rollouts(engine, shape, "whole")
    rollouts = shape.groups * shape.siblings
    tell("rollouts", rollouts / run.wall_s, "rollouts/s", turns=shape.turns, at_once=at_once)
    tell("written", run.counters.written / run.wall_s, "tokens/s")
    tell("prefix cache hits", run.counters.cached / max(1, run.counters.possible), "of what is possible")
    tell("idle", meter.idle_share, "of the time")
    return run


async def measure_rollouts(arguments: argparse.Namespace) -> None:
    """The whole rollout loop with a tool that answers at once; its floor is SGLang with the same requests, bare."""
    shape = SHAPES[arguments.shape]
    async with SGLangEngine([arguments.url], TensorSync()) as engine:
        run = await tell_rollouts(engine, shape, shape.groups * shape.siblings)
        plain_s = await repeat_requests(arguments.url, run.requests, shape)
        tell("written by bare SGLang", run.counters.written / plain_s, "tokens/s")
        tell("share of bare SGLang", plain_s / run.wall_s)
    count = SMALL_AT_ONCE if arguments.small else AT_ONCE
    taken = await repeat_requests(arguments.url, make_requests(shape, count), shape)
    tell("one turn", count * shape.written / taken, "tokens/s", at_once=count, by="bare SGLang")


async def measure_embedded(arguments: argparse.Namespace) -> None:
    """The embedded engine alone on the card, with the work of the part `rollouts`: to be within 3x of SGLang."""
    if not (CUDA or arguments.small):
        return skip("written", "decoding ahead needs CUDA; `python -m bench.engine` measures the engine on a CPU")
    shape, count = SHAPES[arguments.shape], SMALL_AT_ONCE if arguments.small else AT_ONCE
    model = load_model(arguments.model, torch.bfloat16 if CUDA else torch.float32, DEVICE)
    weights = sum(weight.nbytes for weight in model.parameters())
    holding: Holding = "bfloat16" if CUDA else "copied"
    began = time.perf_counter()
    engine = TorchEngine(
        model, max_sequences=count, holding=holding, deterministic=False, steps_ahead=STEPS_AHEAD, longest=shape.context
    )
    async with engine:
        tell("ready", time.perf_counter() - began, "s")
        for note in engine.capabilities.notes:
            tell("note", note)
        await tell_rollouts(engine, shape, count)
        sampling = Sampling(max_tokens=shape.written, seed=0)
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for (ids,) in make_requests(shape, count).values():
                tasks.start_soon(engine.generate, ids, sampling)
        taken = time.perf_counter() - began
        tell("one turn", count * shape.written / taken, "tokens/s", at_once=count, by="embedded engine")
        block = torch.empty(weights // 4, device=DEVICE)
        floor = seconds(lambda: block.sum())
        tell("weights read once a token", count / floor, "tokens/s", at_once=count, bytes=weights)


async def measure_publishing(arguments: argparse.Namespace) -> None:
    """Each way to bring weights to a server; their floor is a copy of the same bytes on the device."""
    policy = Policy.load(arguments.model, UpdateSettings())
    weights = [weight.detach() for weight in policy.model.parameters()]
    size = sum(weight.nbytes for weight in weights)
    tell("copy of the weights", seconds(lambda: [weight.clone() for weight in weights]), "s", bytes=size)
    for sync in ways_to_publish(arguments.work):
        async with SGLangEngine([arguments.url], sync, reference=_reference(policy)) as engine:
            for number in range(1, PUBLISHES + 1):
                began = time.perf_counter()
                await engine.publish(policy.weights, number)
                taken = time.perf_counter() - began
                tell("publishing", taken, "s", way=sync.name, time=number, bytes=engine.published_bytes)
    reason = "adapters alone need a server with LoRA (`make bench-publish`), changed values one with our loader"
    skip("publishing", reason, way="deltas")


def ways_to_publish(work: Path) -> tuple[WeightSync, ...]:
    """Those that these devices can do."""
    ways: tuple[WeightSync, ...] = (TensorSync(), DiskSync(work / "published"))
    if CUDA and torch.cuda.device_count() == 1:
        skip("publishing", "NCCL does not join two processes on one card", way="group")
        return ways
    return (*ways, ProcessGroupSync())


@contextmanager
def _without_forest(policy: Policy) -> Iterator[None]:
    """Runs each sequence alone, as for models whose attention cannot be replaced."""
    reader = policy.logprob_reader
    reader.fallback_reason = "measured without shared prefixes"
    policy.model.set_attn_implementation("sdpa")
    yield


def measure_update(arguments: argparse.Namespace) -> None:
    """Updates with random weights: by size of micro-batch, with and without forests, kernels side by side."""
    shape = SHAPES[arguments.shape]
    matmul = measure_matmul(arguments)
    sizes = (256,) if arguments.small else MICRO_BATCHES
    ways = [(tokens, True, "") for tokens in sizes] + [(sizes[0], False, "")]
    for tokens, forest, kernel in [*ways, *((sizes[0], True, name) for name in ("cudnn", "flash", "efficient"))]:
        with _told_if_it_fails("update", forest=forest, kernel=kernel, micro_batch=tokens):
            _time_updates(arguments.model, shape, tokens, matmul, forest, kernel)


@contextmanager
def _told_if_it_fails(figure: str, **labels: Any) -> Iterator[None]:
    """A kernel that does not take these shapes, or a size that the card has no memory for, costs no other's figure."""
    try:
        yield
    except (RuntimeError, PolicyError) as error:
        traceback.print_exc()
        skip(figure, next(iter(str(error).splitlines()), type(error).__name__)[:200], **labels)
    gc.collect()  # Of what failed.
    torch.cuda.empty_cache()


def _time_updates(
    model: Path,
    shape: ModelShape,
    tokens: int,
    matmul: float,
    forest: bool,
    kernel: str = "",
) -> None:
    """One combination; `kernel` is that of the blocks, in place of the one kernel for a whole forest."""
    policy = Policy.load(model, UpdateSettings(lr=1e-6, micro_batch_tokens=tokens))
    reader = policy.logprob_reader
    reader.one_kernel = reader.one_kernel and not kernel
    attention = "one kernel" if reader.one_kernel and forest else kernel or "chosen by torch"
    context = sdpa_kernel(KERNELS[kernel]) if kernel else nullcontext()
    batch = make_batch(shape)
    total = sum(len(sequence.ids) for sequence in batch.sequences)
    updater = PolicyUpdater(policy, AlgorithmSettings(name="dapo"), exact=False)
    labels = {"forest": forest, "attention": attention, "shape": shape.name, "micro_batch": tokens}
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with nullcontext() if forest else _without_forest(policy), context, GpuIdleMeter() as meter:
        taken = seconds(lambda: updater.train_step(batch), UPDATES)
    layer_tokens, logit_tokens = count_computed(updater.last_rows, tokens, forest)
    flops, peak = update_flops(policy, layer_tokens, logit_tokens) / taken, peak_flops()
    tell("update", total / taken, "tokens/s", **labels)
    tell("computed", layer_tokens / total, "of all tokens", **labels)
    tell("of the card's matmul", flops / matmul, **labels)
    tell("MFU", flops / peak if peak else None, **labels)
    tell("idle", meter.idle_share, "of the time", **labels)
    if CUDA:
        tell("peak memory", torch.cuda.max_memory_allocated() / GIB, "GiB", **labels)


def measure_trl(arguments: argparse.Namespace) -> None:
    """TRL's update on the same rows with as many tokens at once, alone on the card."""
    try:
        find_trl()
    except RuntimeError as error:
        return skip("update", f"TRL: {error}", by="TRL")
    shape = SHAPES[arguments.shape]
    tokens = 256 if arguments.small else MICRO_BATCHES[0]
    policy = Policy.load(arguments.model, UpdateSettings(lr=1e-6, micro_batch_tokens=tokens))
    batch = make_batch(shape)
    updater = PolicyUpdater(policy, AlgorithmSettings(name="dapo"), exact=False)
    norm = updater.train_step(batch)["update/grad_norm"]
    rows, settings = updater.last_rows, policy.settings
    total = sum(len(row.ids) for row in rows)
    del policy, updater
    gc.collect()
    torch.cuda.empty_cache()
    result = measure_trl_update(arguments.model, rows, shape.siblings, settings, UPDATES + 1)
    tell("TRL", result["version"])
    tell("update", total / median(result["steps_s"][1:]), "tokens/s", by="TRL", shape=shape.name, micro_batch=tokens)
    tell("gradient norm", norm, by="mtrl")
    tell("gradient norm", result["grad_norm"], by="TRL")


def run_job(arguments: argparse.Namespace, name: str, settings: Mapping[str, Any], *words: str) -> Path:
    """Runs `mtrl-train` with these settings, as a user does; returns the run's folder."""
    run: Path = arguments.work / name
    if settings.get("engine") == "sglang":
        options = [*SERVER_DTYPE, *arguments.options.split()]
        settings = dict(settings) | {"serving": {"options": options} | settings.get("serving", {})}
    run.with_suffix(".yaml").write_text(yaml.safe_dump(dict(settings)))
    start = ["--config", str(run.with_suffix(".yaml")), "--out", str(run)]
    tools = [] if "tools" in settings else ["--tools", str(ROOT / "tool_configs")]
    command = [sys.executable, "-m", "trainer.cli", *start, *tools, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"mtrl-train ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return run


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def job_settings(arguments: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """The job of `--job`, else word problems for the model of `--policy`, else the default job; on the engine that this
    machine has."""
    if arguments.policy is None or arguments.job is not None:
        settings = yaml.safe_load((arguments.job or DEFAULT_JOB).read_text())
        settings |= {"model": str(arguments.policy)} if arguments.policy else {}
    else:
        settings = write_word_problems(arguments)
    settings |= {"engine": arguments.engine, "early_stop": None}
    return settings | (TINY_JOB if arguments.small else {}) | changes


def write_word_problems(arguments: argparse.Namespace) -> dict[str, Any]:
    """GRPO on word problems, with worked examples before each: without, SmolLM2-135M-Instruct solves none."""
    from real_job import JOB, RealJob, Size

    size = Size(held_out=60, steps=arguments.steps, prompts=16)
    job = RealJob(arguments.work / "problems", arguments.policy.absolute(), 0, size, Console(stderr=True))
    job.write_rows()
    settings = JOB | job.grpo(job.model, examples=True)
    settings["evaluation"] |= {"every": size.steps, "rows": size.held_out, "after": False}
    del settings["update"]["micro_batch_tokens"]  # As many as fit.
    return settings


def measure_memory(arguments: argparse.Namespace) -> None:
    """The most memory in each phase, planned and measured, where a server shares the card in each way; the server fills
    the share that it is given."""
    failures = []
    for placement in PLACEMENTS if arguments.engine == "sglang" else ("one process",):
        try:
            _measure_placement(arguments, placement)
        except RuntimeError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _measure_placement(arguments: argparse.Namespace, placement: str) -> None:
    serving = {"serving": {"placement": placement}} if placement in PLACEMENTS else {}
    quiet = {"steps": 2, "evaluation": {"every": 0, "after": False}}
    with read_used_memory() as used:
        run = run_job(arguments, f"memory-{placement}", job_settings(arguments, **quiet, **serving))
    planned, steps = plan_phases(run), read_steps(run)
    for phase, size in planned.items():
        measured = [step[name] for step in steps if (name := f"machine/peak_gb/{phase}") in step]
        tell("planned", size / GIB, "GiB", placement=placement, phase=phase)
        tell("measured", max(measured) * 1e9 / GIB if measured else None, "GiB", placement=placement, phase=phase)
    tell("memory of the card, most", max(used) / GIB if used else None, "GiB", placement=placement)
    tell("steps", len(steps), placement=placement)


def plan_phases(run: Path) -> dict[str, int]:
    """The bytes that a run's plan has for each phase. On a card, a server's are among them; if it takes turns with the
    trainer, only its reserve is left during an update."""
    settings = load_run_settings(run)
    plan, reserve = plan_memory(settings, Path(read_run_info(run)["model"])), 0
    during_update = plan
    if settings.engine == "sglang":
        trainer = replace(plan, parts=plan.parts[2:])
        plan = plan if CUDA else trainer
        during_update = trainer if settings.serving.placement == "together" else plan
        reserve = server_reserve(settings.serving.options, total_memory()) if CUDA else 0
    needed = {
        "generating": plan.needed_during("generating"),
        "update": max(map(during_update.needed_during, UPDATE)),
        "publishing": plan.needed_during("publishing"),
    }
    return {phase: plan.taken + reserve + size for phase, size in needed.items()}


def measure_learning(arguments: argparse.Namespace) -> None:
    """The job on its model: success as it climbs, and where the time goes."""
    settings = job_settings(arguments, steps=1 if arguments.small else arguments.steps)
    began = time.perf_counter()
    steps = read_steps(run_job(arguments, "learning", settings))
    tell("seconds", time.perf_counter() - began, "s", steps=len(steps))
    for step in steps:
        tell("reward", step.get("reward/mean"), step=int(step["step"]))
        tell("greedy", step.get("eval/greedy"), step=int(step["step"]))
    for name in sorted({name for step in steps for name in step if re.fullmatch(r"time/\w+", name)}):
        tell(name, sum(step.get(name, 0.0) for step in steps), "s")
    apart = [step["mismatch/kl"] for step in steps if "mismatch/kl" in step]
    tell("mismatch KL, most", max(apart) if apart else None, "nats")


def measure_resuming(arguments: argparse.Namespace) -> None:
    """Two epochs in one go, and resumed after the first: weights equal to the bit, or how far off."""
    settings = job_settings(arguments, evaluation={"every": 0, "after": False}, checkpoint={"every": 1})
    if arguments.job is None:  # A step's rows are all that there are.
        rows = arguments.work / "epoch.jsonl"
        rows.write_text("".join(islice(iterate_rows(settings["data"]), settings["prompts"])))
        settings["data"] = str(rows)
    whole = run_job(arguments, "whole", settings | {"steps": 2})
    run_job(arguments, "half", settings | {"steps": 1})
    half = run_job(arguments, "half", settings | {"steps": 2}, "--resume")
    newest = (max(run.glob("checkpoints/*/"), key=lambda folder: folder.name) for run in (whole, half))
    start, first, second = map(read_weights, (Path(read_run_info(whole)["model"]), *newest))
    tell("equal to the bit", all(torch.equal(first[name], second[name]) for name in first))
    for figure, other in (("weights apart, most", second), ("weights moved, most", start)):
        tell(figure, max(float((first[name].float() - other[name].float()).abs().max()) for name in first))


def iterate_rows(data: str) -> Iterator[str]:
    """The lines of a file of rows, or as many as one likes of the demo's tasks."""
    if data != "demo":
        yield from Path(data).read_text().splitlines(keepends=True)
        return
    for problem in draw_problems(0, kinds=("fact", "sum", "hop", "move")):
        task = problem.task
        row = {"id": task.id, "messages": task.messages, "ground_truth": problem.answer}
        given = {"look_up": {"create_kwargs": {"facts": task.columns["facts"]}}}
        yield json.dumps(row | {"tools": ["look_up", "calculate"], "tools_kwargs": given}) + "\n"


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a model's folder."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in folder.rglob("model*.safetensors"):
        weights |= load_file(file)
    return weights


PARTS: Mapping[str, Callable[[argparse.Namespace], Any]] = {
    "floors": measure_floors,
    "kernels": measure_kernels,
    "gates": check_gates,
    "rollouts": measure_rollouts,
    "publishing": measure_publishing,
    "embedded": measure_embedded,
    "update": measure_update,
    "trl": measure_trl,
    "memory": measure_memory,
    "learning": measure_learning,
    "resuming": measure_resuming,
}
DEFAULT_JOB = ROOT / "mtrl_plugins" / "demo" / "jobs" / "default.yaml"


def main(words: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("part", choices=PARTS)
    options.add_argument("--shape", default="tiny", choices=SHAPES)
    options.add_argument("--work", type=Path, required=True, help="a folder for models, runs and logs")
    options.add_argument("--url", default="", help="a running server with the model of --shape")
    options.add_argument("--engine", default="torch", help="of the parts that run whole jobs")
    options.add_argument("--options", default="", help="further options of sglang.launch_server")
    options.add_argument("--job", type=Path, help="the job that learns")
    options.add_argument("--policy", type=Path, help="its model")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--small", action="store_true")
    arguments = options.parse_args(words)
    random.seed(0)
    arguments.model = build_random_model(SHAPES[arguments.shape], arguments.work / arguments.shape, CUDA)
    work = PARTS[arguments.part]
    if arguments.part in ("gates", "rollouts", "publishing", "embedded"):
        anyio.run(work, arguments)
    else:
        work(arguments)


if __name__ == "__main__":
    main()
