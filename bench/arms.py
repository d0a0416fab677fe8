"""Variants of the default job on the same seeds. Each finished run is kept, and the same command goes on after a stop.

python bench/arms.py algorithms   # every algorithm, on tasks that the model solves at times; half an hour of a core
python bench/arms.py ablations    # the loss mask of tool tokens, and credit by turn
python bench/arms.py habit        # trains nothing: success before and after the warm start taught its bad habit
python bench/arms.py algorithms --seeds 0 --arms grpo --steps 2 --out DIR   # a small part of it

Results are bench/results/STUDY.{json,md}. The construction of `algorithms` is that of arXiv 2510.26788: tasks that a
model solves in 20 to 80 % of its tries are within its reach, so an algorithm that works comes to solve nearly all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import anyio  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from arms_table import (  # noqa: E402
    AFTER_TRIES,
    EVAL_TASKS,
    SHOWN_STEPS,
    TRIES,
    Record,
    Run,
    format_ablations,
    format_algorithms,
    format_habit,
    kept_tasks,
)
from real_job import measure_cost  # noqa: E402
from rich.console import Console  # noqa: E402

from gateway.disk_errors import write_atomically  # noqa: E402
from mtrl_plugins.demo.model_cache import find_or_build_model  # noqa: E402
from mtrl_plugins.demo.warm_start import Recipe  # noqa: E402
from trainer.algorithms.named_algorithms import ALGORITHMS  # noqa: E402
from trainer.algorithms.train_batch import TrainBatch, TrainSequence, build_train_batch  # noqa: E402
from trainer.engine.base import Sampling  # noqa: E402
from trainer.engine.torch.torch_engine import TorchEngine  # noqa: E402
from trainer.model import load_model  # noqa: E402
from trainer.reward.scorer import Scorer  # noqa: E402
from trainer.rollout.loop import RolloutRunner  # noqa: E402
from trainer.rollout.task import Task  # noqa: E402
from trainer.setup import make_gateway  # noqa: E402
from trainer.storage.run_files import METRICS_FILE as METRICS  # noqa: E402
from trainer.storage.run_files import StepMetrics, read_metrics  # noqa: E402
from trainer.template import Template  # noqa: E402
from trainer.train.evaluate import Evaluation, evaluate  # noqa: E402
from trainer.train.job import JobObjects, load_tasks  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402
from trainer.train.start import train  # noqa: E402

JOB = ROOT / "mtrl_plugins" / "demo" / "jobs" / "default.yaml"
RESULTS = ROOT / "bench" / "results"
TOOLS = ROOT / "tool_configs"
PACKAGES = ("mtrl-rl", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Arm:
    """One variant of the job."""

    title: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes of the algorithm's settings."""
    train_tool_tokens: bool = False
    """Trains tokens of tools and feedback as if the policy had written them."""

    @contextmanager
    def patch_training(self) -> Iterator[None]:
        """Patches the train loop for this arm, and the account of tokens: more is trained than was sampled."""
        if not self.train_tool_tokens:
            yield
            return
        with (
            patch("trainer.train.train_loop.build_train_batch", build_unmasked_batch),
            patch("trainer.train.collect.TokenAccount.check"),
        ):
            yield


def build_unmasked_batch(*args: Any) -> TrainBatch:
    """A train batch in which all tokens after the prompt are trained, as part of the turn before them."""
    batch = build_train_batch(*args)
    return replace(batch, sequences=tuple(map(unmask_tool_tokens, batch.sequences)))


def unmask_tool_tokens(sequence: TrainSequence) -> TrainSequence:
    """Trains every token after the prompt."""
    turns = list(accumulate(sequence.turns, _last_turn))
    mask = [turn >= 0 for turn in turns]
    return replace(sequence, mask=mask, turns=turns, weights=[float(is_trained) for is_trained in mask])


def _last_turn(before: int, turn: int) -> int:
    return turn if turn >= 0 else before


@dataclass(frozen=True, slots=True)
class Study:
    """Arms that are compared."""

    title: str
    arms: Sequence[Arm]
    seeds: Sequence[int]
    run: Callable[[Arm, int, int | None, Record], Run]
    """Runs an arm with a seed, for fewer steps than the job's own if these are given."""
    format: Callable[[Record], Iterator[str]]
    """The lines of the results as Markdown."""


def default_job(**changes: Any) -> TrainSettings:
    """The default job with changes, where mappings are merged."""
    job = yaml.safe_load(JOB.read_text(encoding="utf-8")) | {"tools": str(TOOLS), "record": False}
    merged = {name: job[name] | new if isinstance(new, dict) and name in job else new for name, new in changes.items()}
    return TrainSettings.model_validate(job | merged)


def train_arm(arm: Arm, job: TrainSettings, objects: JobObjects | None = None) -> dict[int, StepMetrics]:
    """The metrics of each step of a run, whose folder is temporary."""

    async def run(folder: Path) -> None:
        await train(job, folder, Console(quiet=True), objects=objects)

    with tempfile.TemporaryDirectory() as folder, arm.patch_training():
        anyio.run(run, Path(folder) / "run")
        return {int(step["step"]): step for step in read_metrics(Path(folder) / "run" / METRICS)}


async def try_tasks(
    model: Path, job: TrainSettings, tasks: Sequence[Task], tries: int = 1, temperature: float = 1.0
) -> Evaluation:
    """A model's tries of each task, as an evaluation of the job makes them."""
    sampling = Sampling(temperature=temperature)
    async with make_gateway(job) as gateway, TorchEngine(load_model(model)) as engine:
        runner = RolloutRunner(engine, Template.load(model), gateway, job.limits, sampling, seed=job.seed)
        return await evaluate(runner, Scorer(job.reward), tasks, job.concurrency, tries)


START = Recipe(call_probability=0.6)
"""A habit that is weaker than the default job's, so that most tasks are solved at times."""
POOL = 160
"""Tasks that are tried."""
KEPT = "perfectible"
ALGORITHM_STEPS = 30


def run_algorithm(arm: Arm, seed: int, steps: int | None, record: Record) -> Run:
    """Trains on the tasks within reach, which are chosen before the first run; all runs start from one model."""
    model, steps = find_or_build_model(START), steps or ALGORITHM_STEPS
    pool = load_tasks(default_job(seed=START.seed)).train[None][:POOL]
    if "tasks" not in record:
        found = anyio.run(try_tasks, model, default_job(), pool, TRIES)
        record["tasks"] = {task: tries.rate for task, tries in found.outcomes.items()}
    kept = [task for task in pool if task.id in kept_tasks(record)]
    evaluation = {"data": KEPT, "every": steps, "rows": len(kept), "k": AFTER_TRIES, "after": False}
    job = default_job(
        model=str(model), data=KEPT, objects=(KEPT,), seed=seed, steps=steps, early_stop=None,
        algorithm=arm.changes, update={"minibatches": 2}, evaluation=evaluation,
    )  # fmt: skip
    with measure_cost() as cost:
        by_step = train_arm(arm, job, JobObjects({KEPT: lambda: kept}))
    trained = [metrics for step, metrics in by_step.items() if step]
    success = [round(metrics["success/sampled"], 4) for metrics in trained]
    return {
        "before": by_step[0]["eval/sampled"],
        "after": by_step[steps]["eval/sampled"],
        "greedy": by_step[steps]["eval/greedy"],
        "success": success,
        "rollouts": sum(metrics["rollout/count"] for metrics in trained),
        "tokens": sum(metrics["tokens/sampled"] for metrics in trained),
        "mismatch_kl": max(metrics.get("mismatch/kl", 0.0) for metrics in trained),
        "clipped": mean(metrics.get("clipped", 0.0) for metrics in trained),
        **cost,
    }


EVAL_EVERY = 10


def run_ablation(arm: Arm, seed: int, steps: int | None, record: Record) -> Run:
    """Trains the default job to its last step."""
    evaluation = {"every": EVAL_EVERY, "rows": EVAL_TASKS, "final_rows": EVAL_TASKS, "after": False}
    changes = {} if steps is None else {"steps": steps}
    job = default_job(early_stop=None, evaluation=evaluation, algorithm=arm.changes, seed=seed, **changes)
    by_step = train_arm(arm, job)
    greedy = {number: metrics["eval/greedy"] for number, metrics in by_step.items() if "eval/greedy" in metrics}
    return {
        "sampled": {str(number): _mean_sampled_success(by_step, number) for number in greedy if number},
        "greedy": {str(number): value for number, value in greedy.items()},
        "entropy": round([metrics["entropy"] for metrics in by_step.values() if "entropy" in metrics][-1], 4),
        "reward": [round(metrics["reward/mean"], 4) for number, metrics in by_step.items() if number],
    }


def _mean_sampled_success(by_step: Mapping[int, StepMetrics], last: int) -> float:
    """Over the last few steps' own rollouts: no task of the job comes twice."""
    steps = range(max(1, last - SHOWN_STEPS + 1), last + 1)
    return round(mean(by_step[step]["success/sampled"] for step in steps), 4)


HABIT_ROWS = 300


def run_habit(arm: Arm, seed: int, steps: int | None, record: Record) -> Run:
    """Success of the warm-started model on held-out tasks, whose habit was taught or not."""
    recipe = Recipe(seed=seed)
    model = find_or_build_model(recipe if arm is HABIT else replace(recipe, habit_steps=0))
    job = default_job(seed=seed)
    tasks = load_tasks(job).held_out[:HABIT_ROWS]
    ways = {"sampled": 1.0, "greedy": 0.0}
    return {way: round(anyio.run(try_tasks, model, job, tasks, 1, at).all.value, 3) for way, at in ways.items()}


SKILL, HABIT = Arm("skill"), Arm("habit")
ABLATIONS = (
    Arm("as it is: the policy's own tokens, credited with the outcome"),
    Arm("tools' and feedback's tokens trained too", train_tool_tokens=True),
    Arm("credit by turn, against siblings that got as far", {"credit": {"kind": "turns"}}),
)
NAMED = tuple(Arm(name, {"name": name}) for name, found in ALGORITHMS.items() if not found.is_supervised)
STUDIES = {
    "algorithms": Study(
        "All algorithms on tasks within the model's reach", NAMED, range(5), run_algorithm, format_algorithms
    ),
    "ablations": Study("Ablations of the default job", ABLATIONS, range(2), run_ablation, format_ablations),
    "habit": Study(
        "Before any reward: the skill, and the habit that hides it", (SKILL, HABIT), range(5), run_habit, format_habit
    ),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("study", choices=STUDIES)
    options.add_argument("--seeds", type=int, nargs="+", help="all of the study's by default")
    options.add_argument("--arms", nargs="+", metavar="TITLE", help="the same")
    options.add_argument("--steps", type=int, help="fewer than the job's own; needs --out")
    options.add_argument("--out", type=Path, metavar="DIR", default=RESULTS, help="folder for results")
    args = options.parse_args()
    if args.steps and args.out == RESULTS:
        options.error("a run of fewer steps is no result: name another folder with --out")
    torch.set_num_threads(1)
    study, file = STUDIES[args.study], args.out / args.study
    record = read_record(file)
    arms = [arm for arm in study.arms if not args.arms or arm.title in args.arms]
    for arm, seed in start_runs(record, [(arm, seed) for seed in args.seeds or study.seeds for arm in arms]):
        found = {"arm": arm.title, "seed": seed, **study.run(arm, seed, args.steps, record)}
        record["runs"].append(found)
        write_record(file, study, record)
        print(json.dumps(found), file=sys.stderr, flush=True)
    print(file.with_suffix(".md").read_text(encoding="utf-8"))


def start_runs(record: Record, wanted: Sequence[tuple[Arm, int]]) -> list[tuple[Arm, int]]:
    """The wanted runs that the results lack; all of them, if they lack none: then they are measured again."""
    done = {(run["arm"], run["seed"]) for run in record["runs"]}
    if missing := [(arm, seed) for arm, seed in wanted if (arm.title, seed) not in done]:
        return missing
    again = {(arm.title, seed) for arm, seed in wanted}
    record["runs"] = [run for run in record["runs"] if (run["arm"], run["seed"]) not in again]
    record["about"] = describe_environment()
    if not record["runs"]:
        record.pop("tasks", None)
    return list(wanted)


def read_record(file: Path) -> Record:
    """What earlier runs found."""
    if not file.with_suffix(".json").exists():
        return {"about": describe_environment(), "runs": []}
    record: Record = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    return record


def write_record(file: Path, study: Study, record: Record) -> None:
    """The results as JSON and Markdown."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file.with_suffix(".json"), (json.dumps(record, indent=1) + "\n").encode())
    about = [f"{name}: {value}  " for name, value in record["about"].items()]
    text = "\n".join([f"# {study.title}", "", *about, "", *study.format(record)])
    write_atomically(file.with_suffix(".md"), f"{text}\n".encode())


def describe_environment() -> dict[str, str]:
    """Date, machine and versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread; load {os.getloadavg()[0]:.1f} before",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}",
    }


if __name__ == "__main__":
    main()
