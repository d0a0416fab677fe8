"""Compares planned step times with measured ones on five small jobs, on this machine's CPU.

python bench/plan.py                           # writes bench/results/plan.{json,md}; for a quiet machine
python bench/plan.py --paced                   # an engine, updates and tools that sleep: on a busy machine, too
python bench/plan.py --rounds 1 --steps 6      # smoke test; writes nothing without --out

In each round two short synchronous runs are measured, a small and a large one, for the speed of the machine and for
what rollouts do, before and after five other jobs, which are planned from these: the machine may change its pace
meanwhile. The policy hardly learns, so that all runs have rollouts alike. A job's ratio is the median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from mtrl_plugins.plan.plan_run import PlanOptions, make_workload, measured_cluster  # noqa: E402
from mtrl_plugins.plan.simulate import simulate  # noqa: E402
from mtrl_plugins.plan.workload import JobLimits, read_run  # noqa: E402
from trainer.train.run_folder import load_run_settings  # noqa: E402

RESULTS = ROOT / "bench" / "results"
TOLERANCE = 0.15
SKIPPED = 1
"""Steps that are left out of either median, as `read_run` does."""
WALL_S = 300
SLOW_S = 0.2
"""Seconds of a call of the slow tool."""
TOOLS = f'''"""Tools with and without a delay."""

import random

import anyio

from mtrl_plugins.demo.facts.lookup import LookUp


class SlowLookUp(LookUp):
    """Waits before it answers."""

    async def execute(self, *arguments, **more):
        await anyio.sleep({SLOW_S})
        return await super().execute(*arguments, **more)


def varied(attempt):
    """A reward that differs, so that every group has something to learn."""
    return random.random()


def calculate(expression: str) -> str:
    """Works out a sum."""
    return "0"
'''
BASE: dict[str, Any] = {
    "data": "demo",
    "demo": {"kinds": ["fact", "hop"]},
    "tools": "tools",
    "prompts": 8,
    "n": 8,
    "reward": {"components": {"varied": {"function": "tools/bench_tools.py:varied"}}},
    "template": {"sanity": "ignore_strippable"},
    "limits": {"assistant_turns": 6, "tool_calls": 6, "turn_tokens": 40, "rollout_tokens": 200},
    "concurrency": {"inflight_rollouts": 256, "running_requests": 128},
    "algorithm": {"name": "dapo"},
    "update": {"lr": 1e-9},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1000},
}
CALIBRATION: Mapping[str, Mapping[str, Any]] = {"small": {"prompts": 4, "n": 4}, "large": {"prompts": 16, "n": 8}}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "synchronous, 12 x 6": {"prompts": 12, "n": 6},
    "synchronous, tools of 0.2 s": {"tools": "slow"},
    "synchronous, 2 epochs of 2 minibatches": {"update": {"lr": 1e-9, "epochs": 2, "minibatches": 2}},
    "one step off, 12 x 8": {"mode": "one_step_off", "prompts": 12},
    "asynchronous, 8 x 8, staleness 2": {"mode": "asynchronous", "max_staleness": 2},
}


def main() -> None:
    """Runs the rounds, prints a line for each job, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory(prefix="mtrl-plan-") as folder:
        os.chdir(folder)
        write_tools(Path(folder))
        model = train_model(Path(folder))
        rounds = [
            run_round(Path(folder), number, model, options.steps, options.paced) for number in range(options.rounds)
        ]
    rows = [summarize(name, [each[name] for each in rounds]) for name in JOBS]
    for row in rows:
        print(format_row(row))
    out = options.out or (None if options.rounds < 3 else RESULTS)
    if out:
        write_results(rows, out, options)


def write_tools(folder: Path) -> None:
    """A folder of quick tools, and one of slow ones."""
    for name, kind in (("tools", "LookUp"), ("slow", "SlowLookUp")):
        (folder / name).mkdir()
        (folder / name / "bench_tools.py").write_text(TOOLS)
        lines = f"tools: [{{class_name: bench_tools:{kind}}}, {{function: bench_tools:calculate}}]\n"
        (folder / name / "tools.yaml").write_text(lines)


def train_model(folder: Path) -> Path:
    """A demo model that calls its tools, which it does after some steps."""
    outcome = {"components": {"outcome": {"function": "outcome"}}}
    run_job(
        folder,
        "model",
        {**BASE, "prompts": 16, "steps": 25, "update": {"lr": 1e-3, "warmup_steps": 5}, "reward": outcome},
    )
    return max((folder / "model" / "checkpoints").iterdir())


def run_round(folder: Path, number: int, model: Path, steps: int, is_paced: bool) -> dict[str, tuple[float, float]]:
    """Measures the calibration and all jobs once; predicted and measured seconds of a step by job."""
    settings = {**BASE, "model": str(model), "steps": steps}

    def run(name: str, changes: Mapping[str, Any]) -> Path:
        return run_job(folder, f"{number}-{name}", {**settings, **changes}, is_paced)

    def calibrate(when: str) -> list[Path]:
        return [run(f"{name}-{when}", changes) for name, changes in CALIBRATION.items()]

    before = calibrate("before")
    runs = {name: run(str(index), changes) for index, (name, changes) in enumerate(JOBS.items())}
    calibration = before + calibrate("after")
    results = {}
    for name, changes in JOBS.items():
        planned, measured = predict(runs[name], calibration, changes, is_paced), read_run(runs[name]).step_s
        results[name] = planned, measured
        print(f"round {number + 1}: {name}: {planned:.3f} s planned, {measured:.3f} s measured", flush=True)
    return results


def predict(run: Path, calibration: Sequence[Path], changes: Mapping[str, Any], is_paced: bool) -> float:
    """The planned seconds of a step, of a job's settings alone: nothing that was measured in it is used."""
    settings, measured = load_run_settings(run), [read_run(each) for each in calibration]
    slow = SLOW_S if changes.get("tools") == "slow" else None
    workload, _ = make_workload(settings, measured, PlanOptions(1, "cpu", tool_seconds=slow))
    cluster = replace(measured_cluster(settings, measured), is_shared=not is_paced)
    limits = JobLimits.from_settings(settings)
    return simulate(limits, workload, cluster, steps=limits.steps - SKIPPED, warmup=SKIPPED).step_s


def run_job(folder: Path, name: str, settings: Mapping[str, Any], is_paced: bool = False) -> Path:
    """Trains in a process of its own."""
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(settings))
    program = [str(ROOT / "bench" / "paced_train.py")] if is_paced else ["-m", "trainer.cli"]
    command = [sys.executable, *program, "--config", str(file), "--out", str(folder / name)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WALL_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return folder / name


def summarize(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """A job's medians over the rounds."""
    ratios = [planned / measured for planned, measured in pairs]
    return {
        "job": name,
        "planned_s": median(planned for planned, _ in pairs),
        "measured_s": median(measured for _, measured in pairs),
        "ratio": median(ratios),
        "ratios": ratios,
        "within": abs(median(ratios) - 1) <= TOLERANCE,
    }


def format_row(row: Mapping[str, Any]) -> str:
    """A job's line of the table in Markdown."""
    verdict = "met" if row["within"] else "not met"
    spread = f"{min(row['ratios']):.2f} to {max(row['ratios']):.2f}"
    seconds = f"{row['planned_s']:.3f} | {row['measured_s']:.3f}"
    return f"| {row['job']} | {seconds} | {row['ratio']:.2f} | {spread} | {verdict} |"


def write_results(rows: Sequence[Mapping[str, Any]], out: Path, options: argparse.Namespace) -> None:
    """Writes plan.json and plan.md."""
    how = " --paced" if options.paced else ""
    load = os.getloadavg()[1]
    head = (
        "# Planned and measured steps\n\n"
        f"`python bench/plan.py{how}`: {options.rounds} rounds on a CPU with {os.cpu_count()} cores; its load was"
        f" {load:.1f} at the end. Promised: within {TOLERANCE:.0%}.\n\n"
        "| job | planned s | measured s | ratio | of all rounds | promise |\n|---|---|---|---|---|---|\n"
    )
    (out / "plan.md").write_text(head + "\n".join(map(format_row, rows)) + "\n")
    (out / "plan.json").write_text(
        json.dumps({"paced": options.paced, "rounds": options.rounds, "load": load, "jobs": list(rows)}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
