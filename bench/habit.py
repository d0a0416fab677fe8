"""What the habit hides: success of the default job's model before the habit was taught and after; nothing is trained.

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

from trainer.demo.folder import made  # noqa: E402
from trainer.demo.warm import Recipe  # noqa: E402
from trainer.engine.base import Sampling  # noqa: E402
from trainer.engine.torch import TorchEngine  # noqa: E402
from trainer.model import load_model  # noqa: E402
from trainer.play import Player  # noqa: E402
from trainer.reward.scorer import Scorer  # noqa: E402
from trainer.stage import gateway_of  # noqa: E402
from trainer.template import Template  # noqa: E402
from trainer.train.evaluate import evaluate  # noqa: E402
from trainer.train.job import tasks_of  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "habit"
SEEDS = (0, 1, 2, 3, 4)
ROWS = 300
WAYS = {"sampled": 1.0, "greedy": 0.0}
"""And the temperature of each."""


async def success(recipe: Recipe) -> dict[str, float]:
    """On tasks that were held out, as the default job's own evaluation has it."""
    told = yaml.safe_load((ROOT / "trainer/jobs/default.yaml").read_text("utf-8"))
    job = TrainSettings.model_validate(told | {"tools": str(ROOT / "tool_configs")})
    folder, found = made(recipe), {}
    async with gateway_of(job) as gateway, TorchEngine(load_model(folder)) as engine:
        player = Player(engine, Template.load(folder), gateway, job.limits, seed=recipe.seed)
        for way, temperature in WAYS.items():
            asked = replace(player, sampling=Sampling(temperature=temperature))
            done = await evaluate(asked, Scorer(job.reward), tasks_of(job).held_out[:ROWS], job.admission, "kind")
            found[way] = round(done.all.value, 3)
    return found


def told(found: dict[int, dict[str, dict[str, float]]]) -> str:
    lines = [
        "| seed | skill, sampled | skill, greedy | with the habit, sampled | with the habit, greedy |",
        "|--:" * 5 + "|",
    ]
    for seed, by_stage in found.items():
        cells = [f"{rates[way]:.3f}" for rates in by_stage.values() for way in WAYS]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    asked = options.parse_args()
    torch.set_num_threads(1)
    found = {}
    for seed in asked.seeds:
        whole = Recipe(seed=seed)
        stages = {"skill": replace(whole, habit=0), "habit": whole}
        found[seed] = {name: anyio.run(success, recipe) for name, recipe in stages.items()}
        print(seed, found[seed], file=sys.stderr, flush=True)
    print(told(found))
    if set(asked.seeds) >= set(SEEDS):
        about = f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}; {ROWS} held-out tasks"
        RESULTS.with_suffix(".md").write_text(
            f"# Before any reward: the skill, and the habit that hides it\n\n{about}\n\n{told(found)}"
        )
        RESULTS.with_suffix(".json").write_text(json.dumps({"about": about, "seeds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
