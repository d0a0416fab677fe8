"""A step of GRPO as in `make real` beside TRL's: same model, tasks, tools and limits; run by `real_model.py`.

TRL computes on all cores, mtrl on as many as it finds faster. The model first learns some of its own successes, as in
`make real`; it is kept in the cache folder. The prompts are the same tokens. `calculate` stands behind MCP in mtrl,
and is a function in TRL. Gradients are accumulated over micro-batches of 2,048 tokens in mtrl, which leaves groups
without a gradient out, and of 12 rollouts in TRL.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from gpu_trl import ROOT, find_trl
from peers import trl
from real_job import RealJob, Size
from rich.console import Console
from step_costs import StepCost, compute_figures, measure_steps, read_mtrl_step, read_trl_step

from gateway.types import Task, ToolSpec
from mtrl_plugins.demo.model_cache import cache_folder
from trainer.rollout.loop import add_instructions
from trainer.setup import load_template, make_gateway
from trainer.template.chat_template import function_schema
from trainer.template.text_calls import write_calls_as_text
from trainer.train.settings import TrainSettings

ROUNDS, STEPS = 1, 2
"""Runs of each trainer, and the steps of each that count, after a first one: a step of TRL takes five minutes."""
START = Size(sampled=180, start_epochs=2)
"""A short warm start: of a group whose rollouts all succeed, nothing is learned."""
LR = 1e-6
"""Leaves the policy practically unchanged, so that all steps are the same work."""
OURS = "mtrl"
CACHES = {"TRL": None, "TRL, static cache": "static"}
"""TRL's ways to generate on a CPU; its continuous batching needs a GPU to be fast."""
TIMEOUT_S = 3600.0
CHAT_TEMPLATE = r"""
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '\n' if loop.previtem.role == 'tool' else '<|im_start|>user\n' }}
{{- '<tool_response>\n' + message.content + '\n</tool_response>' }}
{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or () %}
{{- '\n' if message.content or not loop.first }}
{{- '<tool_call>\n{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}"""
"""The model's template with calls and results as `template: {calls: text}` writes them."""


def measure_whole_steps(model: Path) -> dict[str, Any]:
    """The figures of each trainer, as medians over its runs of the mean over their steps."""
    peer = trl()
    python, env = find_trl()
    key = sha256(repr((model.resolve(), START)).encode()).hexdigest()[:12]
    job = RealJob(cache_folder() / f"step-{key}", model, 0, START, Console(stderr=True))
    job.write_rows()
    start, _ = anyio.run(job.learn_successes)
    values = job.grpo(start)
    steps = STEPS + 2  # Of mtrl's, the last one saves the model.
    changes = {
        "steps": steps,
        "engine_dtype": "float32",
        "checkpoint": {"every": steps},
        "update": {**values["update"], "lr": LR},
    }
    settings = job.make_settings(**{**values, **changes})
    trl_job = make_trl_job(settings, anyio.run(find_specs, settings))
    ours = [sys.executable, "-m", "trainer.cli", "--config"]
    theirs = [python, str(ROOT / "bench" / "trl_grpo.py")]
    runs: dict[str, list[list[StepCost]]] = {name: [] for name in (OURS, *CACHES)}
    with TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            for name, costs in runs.items():
                print(f"step, round {number + 1} of {ROUNDS}: {name}", file=sys.stderr, flush=True)
                place = Path(folder) / f"{name}-{number}"
                file = place.with_suffix(".json")
                if name == OURS:
                    file.write_text(json.dumps(settings.model_dump(mode="json", exclude_none=True) | {"seed": number}))
                    command, lines = [*ours, str(file), "--out", str(place)], place / "metrics.jsonl"
                else:
                    file.write_text(json.dumps({**trl_job, "seed": number, "cache": CACHES[name]}))
                    command, lines = [*theirs, str(file), str(place)], place
                found = measure_steps(name, command, {**env, "PYTHONPATH": str(ROOT)}, lines, TIMEOUT_S)
                costs.append(found[:STEPS])
    readers = {name: read_mtrl_step if name == OURS else read_trl_step for name in runs}
    figures = {name: asdict(compute_figures(costs, readers[name])) for name, costs in runs.items()}
    size = {"prompts": settings.prompts, "n": settings.n, "rounds": ROUNDS, "steps": STEPS}
    return {"figures": figures, "size": size, "versions": f"TRL {peer.version}"}


async def find_specs(settings: TrainSettings) -> Sequence[ToolSpec]:
    """The tools that the rows name, as the policy is shown them."""
    async with make_gateway(settings) as gateway, gateway.open(Task("0", ("look_up", "calculate"))) as session:
        return session.specs


def make_trl_job(settings: TrainSettings, specs: Sequence[ToolSpec]) -> dict[str, Any]:
    """The job as `trl_grpo.py` reads it."""
    lines = Path(str(settings.data)).read_text().splitlines()
    rows = [json.loads(line) for line in lines[: settings.steps * settings.prompts]]
    prompts = [add_instructions(row["messages"], specs) for row in rows]
    template = load_template(Path(settings.model), settings.template, specs)
    longest = max(len(template.encode_prompt(prompt, specs)) for prompt in prompts)
    return {
        "model": settings.model,
        "chat_template": CHAT_TEMPLATE,
        "rows": [
            {
                "prompt": write_calls_as_text(prompt, [function_schema(spec) for spec in specs]),
                "facts": json.dumps(row["tools_kwargs"]["look_up"]["create_kwargs"]["facts"]),
                "truth": row["ground_truth"],
            }
            for row, prompt in zip(rows, prompts, strict=True)
        ],
        "steps": STEPS + 1,
        "prompts": settings.prompts,
        "n": settings.n,
        "turns": settings.limits.assistant_turns,
        "turn_tokens": settings.limits.turn_tokens,
        "completion_tokens": settings.limits.rollout_tokens - longest,
        "lr": LR,
        "betas": settings.update.betas,
        "threads": os.cpu_count(),
        "tuned": True,
    }


ROWS = (("wall_s", "s"), ("core_s", "core-s"), ("written", "tokens written"), ("calls", "calls"), ("reward", "reward"))


def format_steps(part: Mapping[str, Any]) -> str:
    """A table, with the ratio of each of TRL's ways to ours."""
    size, figures = part["size"], part["figures"]
    title = f"a step: {size['prompts']} prompts, {size['n']} rollouts each, with tools"
    lines = [f"| {title} | {' | '.join(figures)} |", "|---|" + "--:|" * len(figures)]
    for name, row in ROWS:
        digits = 0 if name == "written" else 2 if name == "reward" else 1
        lines.append(f"| {row} | {' | '.join(f'{each[name]:.{digits}f}' for each in figures.values())} |")
    per_token = {name: 1000 * each["wall_s"] / each["written"] for name, each in figures.items()}
    lines.append(f"| s a 1,000 tokens written | {' | '.join(f'{value:.1f}' for value in per_token.values())} |")
    lines.append(
        f"| TRL to mtrl, by token | | {' | '.join(f'{per_token[name] / per_token[OURS]:.2f}' for name in CACHES)} |"
    )
    return "\n".join(lines)
