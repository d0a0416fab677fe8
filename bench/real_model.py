"""Engine, update and steps with a real model of 135 million parameters, beside peers, on a CPU.

python bench/real_model.py                  # an hour and a half; writes bench/results/real_model.{json,md}
python bench/real_model.py --only engine    # or update, step, turns, or experts; others stay as they are

Engines cost core-milliseconds and milliseconds a token, beside Hugging Face's `generate` and an SGLang server
(`make sglang`). An update on given rows costs core-seconds and seconds, beside TRL's on the same rows, and so does a
whole step with tools. `turns` is how far the logprobs of engines are from the trainer's, turn by turn; `experts` is
what router replay makes of that, with a tiny model of experts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import anyio  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from expert_replay import format_replay, measure_replay  # noqa: E402
from fetch_model import PACKAGE, fetch_model  # noqa: E402
from gpu_trl import measure_trl_update  # noqa: E402
from gpu_workload import ModelShape, make_batch  # noqa: E402
from peers import trl  # noqa: E402
from real_step import format_steps, measure_whole_steps  # noqa: E402
from step_costs import core_seconds  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from turn_depth import format_turns, measure_turns  # noqa: E402

from trainer.algorithms.settings import AlgorithmSettings  # noqa: E402
from trainer.engine.base import Sampling  # noqa: E402
from trainer.engine.sglang.http_client import SGLangClient  # noqa: E402
from trainer.engine.sglang.server_process import ServerOptions, ServerProcess  # noqa: E402
from trainer.engine.torch.threads import choose_threads, use_threads  # noqa: E402
from trainer.engine.torch.torch_engine import TorchEngine  # noqa: E402
from trainer.model import configure_torch, load_model  # noqa: E402
from trainer.policy.policy import Policy  # noqa: E402
from trainer.policy.settings import UpdateSettings  # noqa: E402
from trainer.policy.update import PolicyUpdater  # noqa: E402

RESULTS = ROOT / "bench" / "results"
PREFILLED = ((16, 200), (4, 1000))
DECODE_PROMPT = 32
DECODED = {1: 32, 16: 16, 64: 8}
"""Sequences at once, and the ids that each of them decodes after a short prompt."""
TRIES = 3
SAME_CLOCK = 0.1
"""By how much core-seconds may differ from seconds on one thread."""
ROWS = ModelShape("135M", 576, 30, 9, 1536, 49152, groups=1, siblings=8, turns=2, prompt=600, written=50, reply=50)
"""Eight rollouts of a task: 600 tokens are the same in all."""
UPDATES = 3
Prompts = list[list[int]]
Play = Callable[[Prompts, int], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who generates, and the core-seconds that it has used so far."""

    play: Play
    core_s: Callable[[], float] = time.process_time


@dataclass(frozen=True, slots=True)
class Cost:
    """Core-milliseconds and milliseconds a token."""

    core_ms: float
    wall_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="another model's folder")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--out", type=Path, help="the folder for the results")
    args = parser.parse_args()
    configure_torch()
    folder = args.model or fetch_model()
    out = args.out or RESULTS
    file = out / "real_model.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in (args.only,) if args.only else PARTS:
        load = os.getloadavg()[0]
        part = PARTS[name](folder)
        found[name] = {"about": describe_machine(load, part.pop("versions"), part.pop("model", PACKAGE)), "found": part}
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
    text = format_results(found)
    print(text)
    (out / "real_model.md").write_text(text)


def describe_machine(load: float, versions: str, model: str) -> str:
    """Date, model, machine and versions."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, load {load:.1f} before"
    return f"{time.strftime('%Y-%m-%d')}; {model}; {machine}; torch {version('torch')}, {versions}"


async def measure_engines(folder: Path) -> dict[str, Any]:
    """What a token costs each contestant."""
    model = load_model(folder)
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        found, versions = await _measure_in_turns(folder, model)
        found["floor"] = measure_floors(model)
    return {**found, "versions": f"transformers {version('transformers')}, {versions}"}


async def _measure_in_turns(folder: Path, model: PreTrainedModel) -> tuple[dict[str, dict[str, dict[str, float]]], str]:
    """The costs of each contestant by figure; SGLang's release, and the threads that our engine chose."""
    samples: dict[str, dict[str, list[Cost]]] = {}
    cores = os.cpu_count() or 1
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(TorchEngine(model, deterministic=False, cache_bytes=0))
        exact = await stack.enter_async_context(TorchEngine(model, deterministic=True, cache_bytes=0))
        server, release = await stack.enter_async_context(_open_server(folder))
        contestants = {
            "mtrl": Contestant(lambda prompts, new: _play(engine, prompts, new)),
            "mtrl, deterministic": Contestant(lambda prompts, new: _play(exact, prompts, new)),
            "transformers, 1 thread": Contestant(lambda prompts, new: _generate(model, prompts, new, 1)),
            f"transformers, {cores} threads": Contestant(lambda prompts, new: _generate(model, prompts, new, cores)),
            "SGLang": server,
        }
        for attempt in range(TRIES):
            for name, contestant in contestants.items():
                print(f"engine, round {attempt + 1} of {TRIES}: {name}", file=sys.stderr, flush=True)
                for figure, value in await _measure_once(contestant, attempt):
                    samples.setdefault(name, {}).setdefault(figure, []).append(value)
    found = {
        name: {
            figure: {"core_ms": median(cost.core_ms for cost in costs), "ms": median(cost.wall_ms for cost in costs)}
            for figure, costs in figures.items()
        }
        for name, figures in samples.items()
    }
    return found, f"SGLang {release}, mtrl on {engine.threads} thread(s)"


async def _measure_once(contestant: Contestant, attempt: int) -> list[tuple[str, Cost]]:
    async def time_it(prompts: Prompts, new: int) -> Cost:
        core, wall = contestant.core_s(), time.perf_counter()
        await contestant.play(prompts, new)
        return Cost(1000 * (contestant.core_s() - core), 1000 * (time.perf_counter() - wall))

    await time_it(_draw_prompts(1, 8, attempt), 2)
    found = []
    for count, new in DECODED.items():
        prompts, tokens = _draw_prompts(count, DECODE_PROMPT, attempt), count * new
        prefill, whole = await time_it(prompts, 1), await time_it(prompts, new + 1)
        found.append(
            (
                f"decode, {count} at once",
                Cost((whole.core_ms - prefill.core_ms) / tokens, (whole.wall_ms - prefill.wall_ms) / tokens),
            )
        )
    for count, length in PREFILLED:
        cost = await time_it(_draw_prompts(count, length, attempt), 1)
        tokens = count * length
        found.append((f"prefill, {count} x {length}", Cost(cost.core_ms / tokens, cost.wall_ms / tokens)))
    return found


def _draw_prompts(count: int, length: int, seed: int) -> Prompts:
    draw = random.Random(seed)
    return [[draw.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


async def _play(engine: TorchEngine, prompts: Prompts, new: int) -> None:
    async def generate(ids: Sequence[int], seed: int) -> None:
        await engine.generate(ids, Sampling(max_tokens=new, seed=seed))

    async with anyio.create_task_group() as tasks:
        for seed, ids in enumerate(prompts):
            tasks.start_soon(generate, ids, seed)


async def _generate(model: Any, prompts: Prompts, new: int, threads: int) -> None:
    """Its fastest way on a CPU: one padded batch, with a static cache."""
    ids = torch.tensor(prompts)
    options = {"do_sample": True, "top_k": 0, "cache_implementation": "static", "disable_compile": True}
    with use_threads(threads):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, pad_token_id=0, **options
        )


@asynccontextmanager
async def _open_server(folder: Path) -> AsyncIterator[tuple[Contestant, str]]:
    """An SGLang server that keeps nothing of a prompt, and gets all prompts in one request; its release."""
    options = ServerOptions(context=PREFILLED[-1][1] + 100, cache_tokens=32768, extra=("--disable-radix-cache",))
    with TemporaryDirectory() as place:
        async with (
            ServerProcess(folder, options, log=Path(place) / "log") as server,
            SGLangClient(server.url) as client,
        ):

            async def play(prompts: Prompts, new: int) -> None:
                params = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
                answers = await client.post("/generate", {"input_ids": prompts, "sampling_params": params}, within=600)
                if any(len(answer["output_ids"]) != new for answer in answers):
                    raise RuntimeError("the server stopped early")

            release = str((await client.get("/server_info"))["version"])
            yield Contestant(play, lambda: core_seconds(psutil.Process(server.pid))), release


def measure_floors(model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """What products of the model's size cost alone on one thread, which reads its weights once."""
    weights = [value for value in model.parameters() if value.ndim == 2]
    floors = {}
    for count in DECODED:
        inputs = {value.shape[1]: torch.ones(count, value.shape[1]) for value in weights}
        costs = []
        for _ in range(TRIES + 1):
            began = time.perf_counter()
            for value in weights:
                torch.mm(inputs[value.shape[1]], value.detach().t())
            costs.append(1000 * (time.perf_counter() - began) / count)
        floors[f"decode, {count} at once"] = {"core_ms": median(costs[1:]), "ms": median(costs[1:])}
    return floors


def measure_updates(folder: Path) -> dict[str, Any]:
    """Core-seconds and seconds of an update on the same rows, and its gradient norm; the first one warms up."""
    settings = UpdateSettings(lr=1e-6, micro_batch_tokens=8192)
    policy = Policy.load(folder, settings)
    batch = make_batch(ROWS)
    algorithm = AlgorithmSettings.model_validate({"name": "dapo", "mismatch": {"truncate": "never"}})  # TRL's loss
    updater = PolicyUpdater(policy, algorithm, exact=False)
    norm, steps = 0.0, []
    threads = choose_threads(policy.model)
    with use_threads(threads):
        for number in range(UPDATES + 1):
            core, wall = time.process_time(), time.perf_counter()
            metrics = updater.train_step(batch)
            steps.append((time.process_time() - core, time.perf_counter() - wall))
            norm = norm if number else metrics["update/grad_norm"]
        rows = updater.last_rows
        del policy, updater
        trl()
        peer = measure_trl_update(folder, rows, ROWS.siblings, settings, UPDATES + 1, timeout_s=1800)
    costs = {"mtrl": steps, "TRL": list(zip(peer["steps_core_s"], peer["steps_s"], strict=True))}
    found = {
        name: {"core_s": median(core for core, _ in some[1:]), "wall_s": median(wall for _, wall in some[1:])}
        for name, some in costs.items()
    }
    norms = {"mtrl": norm, "TRL": peer["grad_norm"]}
    by_name = {name: {**found[name], "grad_norm": norms[name], "threads": threads} for name in found}
    return {**by_name, "versions": f"TRL {peer['version']}"}


def _format_cost(cost: Mapping[str, float] | None) -> str:
    """Core-milliseconds, and milliseconds where several threads make these others."""
    if cost is None:
        return ""
    core_ms, wall_ms = cost["core_ms"], cost["ms"]
    return f"{core_ms:.2f}" + (f" ({wall_ms:.2f})" if abs(core_ms / wall_ms - 1) > SAME_CLOCK else "")


def format_results(found: dict[str, Any]) -> str:
    """Tables in Markdown."""
    lines = ["# A real model on a CPU"]
    if part := found.get("engine"):
        engine = part["found"]
        title = "core-ms a token (ms by the clock, if others)"
        lines += ["", f"| {title} | {' | '.join(engine)} |", "|---|" + "--:|" * len(engine)]
        for figure in engine["mtrl"]:
            lines.append(f"| {figure} | {' | '.join(_format_cost(costs.get(figure)) for costs in engine.values())} |")
        lines += ["", f"Measured {part['about']}."]
    if part := found.get("update"):
        update = part["found"]
        ours, theirs = update["mtrl"], update["TRL"]
        shape = f"{ROWS.siblings} rows, {ROWS.prompt} tokens the same in all, {ours['threads']} threads"
        lines += ["", f"| an update: {shape} | mtrl | TRL | TRL to mtrl |", "|---|--:|--:|--:|"]
        for key, title in (("core_s", "core-s"), ("wall_s", "s"), ("grad_norm", "gradient norm")):
            lines.append(f"| {title} | {ours[key]:.2f} | {theirs[key]:.2f} | {theirs[key] / ours[key]:.2f} |")
        lines += ["", f"Measured {part['about']}."]
    if part := found.get("step"):
        lines += ["", format_steps(part["found"]), "", f"Measured {part['about']}."]
    if part := found.get("turns"):
        lines += ["", format_turns(part["found"]["turns"]), "", f"Measured {part['about']}."]
    if part := found.get("experts"):
        lines += ["", format_replay(part["found"]["replay"]), "", f"Measured {part['about']}."]
    return "\n".join(lines) + "\n"


PARTS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "engine": partial(anyio.run, measure_engines),
    "update": measure_updates,
    "step": measure_whole_steps,
    "turns": partial(anyio.run, measure_turns),
    "experts": lambda _: anyio.run(measure_replay),
}


if __name__ == "__main__":
    main()
