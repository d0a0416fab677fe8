"""Success of the default job's model before and after it was taught its bad habit by the warm start; trains nothing.

python bench/habit.py                     # writes bench/results/habit.{json,md}
python bench/habit.py --seeds 0           # only prints
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402

from mtrl_plugins.demo.model_cache import find_or_build_model  # noqa: E402
from mtrl_plugins.demo.warm_start import Recipe  # noqa: E402
from trainer.engine.base import Sampling  # noqa: E402
from trainer.engine.torch.torch_engine import TorchEngine  # noqa: E402
from trainer.model import load_model  # noqa: E402
from trainer.reward.scorer import Scorer  # noqa: E402
from trainer.rollout.loop import RolloutRunner  # noqa: E402
from trainer.setup import make_gateway  # noqa: E402
from trainer.template import Template  # noqa: E402
from trainer.train.evaluate import evaluate  # noqa: E402
from trainer.train.job import load_tasks  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "habit"
SEEDS = (0, 1, 2, 3, 4)
ROWS = 300
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}


async def measure_success(recipe: Recipe) -> dict[str, float]:
    """Success on held-out tasks, measured as the default job's evaluation does."""
    values = yaml.safe_load((ROOT / "mtrl_plugins/demo/jobs/default.yaml").read_text("utf-8"))
    job = TrainSettings.model_validate(values | {"tools": str(ROOT / "tool_configs")})
    folder, success = find_or_build_model(recipe), {}
    async with make_gateway(job) as gateway, TorchEngine(load_model(folder)) as engine:
        runner = RolloutRunner(engine, Template.load(folder), gateway, job.limits, seed=recipe.seed)
        tasks, scorer = load_tasks(job).held_out[:ROWS], Scorer(job.reward)
        for name, temperature in TEMPERATURES.items():
            sampling = Sampling(temperature=temperature)
            evaluation = await evaluate(replace(runner, sampling=sampling), scorer, tasks, job.concurrency)
            success[name] = round(evaluation.all.value, 3)
    return success


def format_results(results: dict[int, dict[str, dict[str, float]]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| seed | skill, sampled | skill, greedy | with the habit, sampled | with the habit, greedy |",
        "|--:" * 5 + "|",
    ]
    for seed, by_stage in results.items():
        cells = [f"{rates[name]:.3f}" for rates in by_stage.values() for name in TEMPERATURES]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = options.parse_args()
    torch.set_num_threads(1)
    results = {}
    for seed in args.seeds:
        recipe = Recipe(seed=seed)
        stages = {"skill": replace(recipe, habit_steps=0), "habit": recipe}
        results[seed] = {name: anyio.run(measure_success, stage) for name, stage in stages.items()}
        print(seed, results[seed], file=sys.stderr, flush=True)
    print(format_results(results))
    if set(args.seeds) >= set(SEEDS):
        about = f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}; {ROWS} held-out tasks"
        RESULTS.with_suffix(".md").write_text(
            f"# Before any reward: the skill, and the habit that hides it\n\n{about}\n\n{format_results(results)}"
        )
        RESULTS.with_suffix(".json").write_text(json.dumps({"about": about, "seeds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
