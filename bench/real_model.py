"""The embedded engine beside Hugging Face's `generate` with a real model of 135 million parameters, on one core.

python bench/real_model.py            # a few minutes; prints a table
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import torch
from transformers import PreTrainedModel, __version__

from mtrl_plugins.demo.real.fetch_model import PACKAGE, fetch_model
from trainer.engine.base import Sampling
from trainer.engine.torch.torch_engine import TorchEngine
from trainer.model import configure_torch, load_model

PROMPT, LONG_PROMPT = 200, 1000
DECODED = {1: 32, 16: 16, 64: 8}
"""Sequences at once, and the ids that each of them decodes."""
TRIES = 3
Prompts = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="another model's folder")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    args = parser.parse_args()
    configure_torch()
    model = load_model(args.model or fetch_model())
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    with torch.inference_mode():
        figures = anyio.run(measure, model)
    figures |= {"floor": measure_floors(model)}
    print(format_figures(figures))
    if args.json:
        about = {"date": time.strftime("%Y-%m-%d"), "model": PACKAGE, "torch": torch.__version__, "hf": __version__}
        args.json.write_text(json.dumps({"about": about, "core_ms_a_token": figures}, indent=1) + "\n")


async def measure(model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """Core-milliseconds a token of each contestant, who take turns."""
    async with (
        TorchEngine(model, deterministic=False, cache_bytes=0) as engine,
        TorchEngine(model, deterministic=True, cache_bytes=0) as exact,
    ):
        contestants = {
            "mtrl": lambda prompts, new: _play(engine, prompts, new),
            "mtrl, deterministic": lambda prompts, new: _play(exact, prompts, new),
            "transformers": lambda prompts, new: _generate(model, prompts, new),
        }
        samples: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
        for attempt in range(TRIES):
            for name, play in contestants.items():
                for figure, value in await _measure_once(play, attempt):
                    samples[name].setdefault(figure, []).append(value)
    return {name: {figure: median(values) for figure, values in found.items()} for name, found in samples.items()}


async def _measure_once(play: Any, attempt: int) -> list[tuple[str, float]]:
    async def cost(prompts: Prompts, new: int) -> float:
        began = time.process_time()
        await play(prompts, new)
        return 1000 * (time.process_time() - began)

    await cost(_draw_prompts(1, 8, attempt), 2)
    found = []
    for count, new in DECODED.items():
        prompts = _draw_prompts(count, PROMPT, attempt)
        prefill = await cost(prompts, 1)
        found.append((f"decode, {count} at once", (await cost(prompts, new + 1) - prefill) / count / new))
    found.append((f"prefill, 16 x {PROMPT}", await cost(_draw_prompts(16, PROMPT, attempt), 1) / 16 / PROMPT))
    found.append(
        (f"prefill, 4 x {LONG_PROMPT}", await cost(_draw_prompts(4, LONG_PROMPT, attempt), 1) / 4 / LONG_PROMPT)
    )
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


async def _generate(model: Any, prompts: Prompts, new: int) -> None:
    """Its fastest way on a CPU: one padded batch, with a static cache."""
    ids = torch.tensor(prompts)
    options = {"do_sample": True, "top_k": 0, "cache_implementation": "static", "disable_compile": True}
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, pad_token_id=0, **options
    )


def measure_floors(model: PreTrainedModel) -> dict[str, float]:
    """What products of the model's size cost alone, and reading its weights once."""
    weights = [value for value in model.parameters() if value.ndim == 2]
    floors = {}
    for count in DECODED:
        inputs = {value.shape[1]: torch.ones(count, value.shape[1]) for value in weights}
        costs = []
        for _ in range(TRIES + 1):
            began = time.process_time()
            for value in weights:
                torch.mm(inputs[value.shape[1]], value.detach().t())
            costs.append(1000 * (time.process_time() - began) / count)
        floors[f"decode, {count} at once"] = median(costs[1:])
    return floors


def format_figures(figures: dict[str, dict[str, float]]) -> str:
    """Core-milliseconds a token, and ours over transformers'."""
    names = list(figures)
    lines = [f"| core-ms a token | {' | '.join(names)} | transformers to mtrl |", "|---|" + "--:|" * (len(names) + 1)]
    for figure, value in figures["mtrl"].items():
        cells = [f"{figures[name][figure]:.2f}" if figure in figures[name] else "" for name in names]
        lines.append(f"| {figure} | {' | '.join(cells)} | {figures['transformers'][figure] / value:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
