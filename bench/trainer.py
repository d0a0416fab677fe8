"""Cost of a GRPO step in mtrl and in TRL's GRPOTrainer: same model, tools, prompts, group size and lengths.

python bench/trainer.py             # ten minutes; writes bench/results/trainer.{json,md}
python bench/trainer.py --quick     # smoke test with a random model; installs nothing
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
import yaml  # noqa: E402
from operations import count_operations, format_counts  # noqa: E402
from peers import Peer, trl  # noqa: E402
from step_costs import Figures, StepCost, compute_figures, measure_steps, read_mtrl_step, read_trl_step  # noqa: E402

from mtrl_plugins.demo.facts.facts_demo import build_model  # noqa: E402
from mtrl_plugins.demo.facts.facts_tasks import TOOLS  # noqa: E402
from mtrl_plugins.demo.model_cache import cache_folder, find_or_build_model  # noqa: E402
from mtrl_plugins.demo.warm_start import Recipe  # noqa: E402
from trainer.data.curriculum import TaskStream  # noqa: E402
from trainer.rollout.settings import ConcurrencySettings, RolloutLimits  # noqa: E402
from trainer.template import Template  # noqa: E402
from trainer.train.job import load_tasks  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402

RESULTS = ROOT / "bench" / "results"
KINDS = ("fact", "sum", "hop", "move")
"""One, one, two and three calls. Without judged tasks: TRL has tools, but no interactions."""
HALF_TRAINED = Recipe(call_probability=0.75)
"""A model that sometimes guesses instead of calling, as half-way through a run: rewards differ within groups."""
LEARNING_RATE = 1e-6
"""Leaves the policy practically unchanged, so that every step of both trainers is the same work."""
PROMISED = 3.0
OURS, OURS_MCP = "mtrl", "mtrl_mcp"
"""With the same tools as TRL, a class and a function; and with the calculator behind MCP."""
TRL_TUNED, TRL_DEFAULT = "trl", "trl_as_it_comes"
"""With settings that make it fastest, in our precision; and with its defaults."""
TIMEOUT_S = 400.0
PACKAGES = ("mtrl-rl", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int = 3
    steps: int = 15
    warm: int = 5
    """First steps, which are not counted."""
    prompts: int = 16
    siblings: int = 8


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one small round")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    size = Size(1, 3, 1, 2, 4) if args.quick else Size()
    torch.set_num_threads(1)
    peer = trl(install=not args.quick)
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model") if args.quick else find_or_build_model(HALF_TRAINED, cache_folder())
        load_before = os.getloadavg()[0]
        figures = measure(size, job_settings(size, model), peer, Path(folder))
    counts = format_counts(*count_operations())
    about = describe_environment(size, peer, load_before)
    text = format_results(figures, peer, about) + f"\n{counts}\n"
    print(text)
    out = args.out or (None if args.quick else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "trainer.md").write_text("# A step of GRPO with mtrl and TRL\n\n" + text)
        by_name = {name: asdict(item) for name, item in figures.items()}
        content = {"about": about, "size": asdict(size), "problem": peer.problem, "figures": by_name}
        (out / "trainer.json").write_text(json.dumps(content, indent=1) + "\n")


def job_settings(size: Size, model: Path) -> TrainSettings:
    """The default job without evaluation, and with a policy that stays practically unchanged."""
    return TrainSettings.model_validate(
        {
            "model": str(model),
            "demo": {"kinds": KINDS},
            "steps": size.steps,
            "prompts": size.prompts,
            "n": size.siblings,
            "reward": {"components": {"outcome": {"function": "outcome"}}},
            "limits": RolloutLimits(assistant_turns=6, tool_calls=6, turn_tokens=40, rollout_tokens=200).model_dump(),
            "concurrency": ConcurrencySettings(inflight_rollouts=256, running_requests=128).model_dump(),
            "algorithm": {"name": "dapo"},
            "update": {"lr": LEARNING_RATE},
            "evaluation": {"every": 0},
            "checkpoint": {"every": size.steps},
        }
    )


def measure(size: Size, job: TrainSettings, peer: Peer, folder: Path) -> dict[str, Figures]:
    """Runs all trainers in interleaved rounds, so that a busy moment of the machine affects all of them."""
    for name, tools in ((OURS, _write_tool_files(folder / "tools")), (OURS_MCP, ROOT / "tool_configs")):
        values = job.model_dump(mode="json", exclude_none=True) | {"tools": str(tools)}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    trl_job = _make_trl_job(size, job)
    for name in (TRL_TUNED, TRL_DEFAULT):
        (folder / f"{name}.json").write_text(json.dumps({**trl_job, "tuned": name == TRL_TUNED}))
    runs: dict[str, list[list[StepCost]]] = {}
    for number in range(size.rounds):
        for name in (OURS, OURS_MCP) if peer.problem else (OURS, OURS_MCP, TRL_TUNED, TRL_DEFAULT):
            is_trl = name in (TRL_TUNED, TRL_DEFAULT)
            steps = _run_trl(name, peer, folder, number) if is_trl else _run_mtrl(name, folder, number)
            runs.setdefault(name, []).append(steps[size.warm - 1 :])
            print(f"round {number + 1} of {size.rounds}: {name}", file=sys.stderr)
    readers = {OURS: read_mtrl_step, OURS_MCP: read_mtrl_step, TRL_TUNED: read_trl_step, TRL_DEFAULT: read_trl_step}
    return {name: compute_figures(steps, readers[name]) for name, steps in runs.items()}


def _write_tool_files(folder: Path) -> Path:
    """Tool files with the shipped lookup, and the calculator's function without its server."""
    folder.mkdir()
    shutil.copy(ROOT / "tool_configs" / "servers" / "calculator.py", folder)
    tools = yaml.safe_load((ROOT / "tool_configs" / "lookup.yaml").read_text())
    tools["tools"].append({"function": "calculator:calculate"})  # The model was warmed up with this order.
    (folder / "tools.yaml").write_text(yaml.safe_dump(tools))
    return folder


def _run_mtrl(name: str, folder: Path, number: int) -> list[StepCost]:
    out = folder / f"{name}-{number}"
    command = [sys.executable, "-m", "trainer.cli", "--config", str(folder / f"{name}.yaml"), "--out", str(out)]
    return measure_steps("mtrl", command, _env(), out / "metrics.jsonl", TIMEOUT_S)


def _run_trl(name: str, peer: Peer, folder: Path, number: int) -> list[StepCost]:
    lines = folder / f"{name}-{number}.jsonl"
    command = [peer.python, str(ROOT / "bench" / "trl_grpo.py"), str(folder / f"{name}.json"), str(lines)]
    return measure_steps(peer.title, command, _env(), lines, TIMEOUT_S)


def _make_trl_job(size: Size, job: TrainSettings) -> Mapping[str, Any]:
    """The job as `trl_grpo.py` reads it."""
    tasks = list(islice(TaskStream(job.curriculum, load_tasks(job).train, seed=job.seed), size.steps * size.prompts))
    template = Template.load(job.model)
    longest = max(len(template.encode_prompt(task.messages, TOOLS)) for task in tasks)
    rows = [
        {"prompt": list(task.messages), "facts": json.dumps(task.columns["facts"]), "truth": str(task.truth)}
        for task in tasks
    ]
    return {
        "model": job.model,
        "rows": rows,
        "steps": size.steps,
        "prompts": size.prompts,
        "n": size.siblings,
        "turns": job.limits.assistant_turns,
        "turn_tokens": job.limits.turn_tokens,
        "threads": 1,
        "completion_tokens": job.limits.rollout_tokens - longest,
        "lr": job.update.lr,
        "betas": job.update.betas,
        "seed": job.seed,
    }


def _env() -> Mapping[str, str]:
    """One thread each, and no access to a hub."""
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    return os.environ | alone


ROWS = (
    ("core-seconds of a step", "core_s", ".2f"),
    ("tokens generated per second of rollouts", "written_per_s", ",.0f"),
    ("tokens trained per second of the rest", "learned_per_s", ",.0f"),
    ("rollouts in a step", "rollouts", ",.0f"),
    ("turns in a step", "turns", ",.0f"),
    ("tool calls in a step", "calls", ",.0f"),
    ("tokens generated in a step", "written", ",.0f"),
    ("tokens in all in a step", "tokens", ",.0f"),
    ("mean reward", "reward", ".2f"),
)
"""Title, name and format of a figure."""


def format_results(figures: Mapping[str, Figures], peer: Peer, about: Mapping[str, str]) -> str:
    """The results as Markdown."""
    heads = {
        OURS: "mtrl",
        OURS_MCP: "mtrl, calculator behind MCP",
        TRL_TUNED: f"{peer.title}, tuned",
        TRL_DEFAULT: f"{peer.title}, as it comes",
    }
    lines = [f"{name}: {value}  " for name, value in about.items()]
    lines += ["", f"| | {' | '.join(heads[name] for name in figures)} |", "|---|" + "--:|" * len(figures)]
    for title, name, number_format in ROWS:
        cells = (format(getattr(item, name), number_format) for item in figures.values())
        lines.append(f"| {title} | {' | '.join(cells)} |")
    if TRL_TUNED in figures:
        lines += ["", *_format_promises(figures, heads)]
    else:
        lines += ["", f"TRL was not measured: {peer.problem}."]
    return "\n".join(lines) + "\n"


def _format_promises(figures: Mapping[str, Figures], heads: Mapping[str, str]) -> list[str]:
    lines = ["| promise | measured | |", "|---|--:|---|"]
    for name in (TRL_TUNED, TRL_DEFAULT):
        times = figures[name].core_s / figures[OURS].core_s
        verdict = "met" if times >= PROMISED else "**missed**"
        lines.append(f"| a step at least {PROMISED:g}x as cheap as that of {heads[name]} | {times:.1f}x | {verdict} |")
    return lines


def describe_environment(size: Size, peer: Peer, load_before: float) -> dict[str, str]:
    """Date, machine, versions and workload."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread; load {load_before:.1f} before the run",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}; "
        f"{peer.title}",
        "step": f"{size.prompts} prompts of {', '.join(KINDS)}, {size.siblings} rollouts each; medians over "
        f"{size.rounds} runs of each trainer in turns, {size.steps - size.warm} steps of each after {size.warm}",
        "tuned": "full precision, nothing computed twice, four passes; TRL as it comes has bfloat16, layers computed "
        "twice and passes of eight rollouts",
    }


if __name__ == "__main__":
    main()
