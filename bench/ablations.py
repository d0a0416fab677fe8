"""Ablations on the default job: the loss mask of tool tokens, and credit by turn instead of by rollout.

python bench/ablations.py                      # some minutes; writes bench/results/ablations.{json,md}
python bench/ablations.py --seeds 0 --steps 2  # smoke test; writes nothing without --out
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from rich.console import Console  # noqa: E402

from trainer.algorithms.train_batch import TrainBatch, TrainSequence, build_train_batch  # noqa: E402
from trainer.storage.run_files import METRICS_FILE as METRICS  # noqa: E402
from trainer.storage.run_files import StepMetrics, read_metrics  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402
from trainer.train.start import train  # noqa: E402

JOB = ROOT / "mtrl_plugins" / "demo" / "jobs" / "default.yaml"
RESULTS = ROOT / "bench" / "results"
SEEDS = (0, 1)
EVAL_EVERY = 10
EVAL_TASKS = 100
"""Held-out tasks of one greedy evaluation."""
SAMPLED_STEPS = 5
"""Sampled success is the mean over this many steps' own rollouts. No task of the job comes twice."""
PACKAGES = ("mtrl-rl", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Arm:
    """One variant of the job."""

    title: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the algorithm's settings."""
    train_tool_tokens: bool = False
    """Trains tokens of tools and feedback as if the policy had written them."""

    def patch_training(self) -> AbstractContextManager[Any]:
        """Patches the train loop for this arm."""
        if not self.train_tool_tokens:
            return nullcontext()
        return patch("trainer.train.train_loop.build_train_batch", build_unmasked_batch)


ARMS = (
    Arm("as it is: the policy's own tokens, credited with the outcome"),
    Arm("tools' and feedback's tokens trained too", train_tool_tokens=True),
    Arm("credit by turn, against siblings that got as far", {"credit": {"kind": "turns"}}),
)


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm with one seed."""

    arm: str
    seed: int
    sampled: Mapping[str, float]
    """By step: the share of right rollouts in the last few steps."""
    greedy: Mapping[str, float]
    """By step, from 0 on."""
    entropy: float
    """At the end, nats per token."""
    reward: Sequence[float]


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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options.add_argument("--steps", type=int, help="fewer than the job's own")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    out = args.out or (None if args.steps else RESULTS)
    torch.set_num_threads(1)
    about, results = describe_environment(), []
    for seed in args.seeds:
        for arm in ARMS:
            results.append(train_arm(arm, arm_settings(arm, seed, args.steps)))
            print(f"seed {seed}, {arm.title}: greedy {results[-1].greedy}", file=sys.stderr, flush=True)
            if out is not None:
                _write_results(out, results, about)
    print(format_results(results, about))


def _write_results(out: Path, results: Sequence[ArmResult], about: Mapping[str, str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "ablations.md").write_text("# Ablations of the default job\n\n" + format_results(results, about))
    content = {"about": about, "trained": [asdict(result) for result in results]}
    (out / "ablations.json").write_text(json.dumps(content, indent=1) + "\n")


def arm_settings(arm: Arm, seed: int, steps: int | None) -> TrainSettings:
    """The default job with an arm's changes."""
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    job["early_stop"] = None
    job["evaluation"] = {"every": EVAL_EVERY, "rows": EVAL_TASKS, "final_rows": EVAL_TASKS}
    job["algorithm"] |= arm.changes
    overrides = {} if steps is None else {"steps": steps}
    fixed = {"tools": str(ROOT / "tool_configs"), "record": False, "seed": seed}
    return TrainSettings.model_validate(job | fixed | overrides)


def train_arm(arm: Arm, job: TrainSettings) -> ArmResult:
    """Trains in a temporary folder. The warmed model is built once per seed, in the user's model cache."""

    async def run(folder: Path) -> None:
        await train(job, folder, Console(quiet=True))

    with tempfile.TemporaryDirectory() as folder, arm.patch_training():
        anyio.run(run, Path(folder) / "run")
        steps = {int(step["step"]): step for step in read_metrics(Path(folder) / "run" / METRICS)}
    greedy = {number: step["eval/greedy"] for number, step in steps.items() if "eval/greedy" in step}
    reward = [round(step["reward/mean"], 4) for number, step in steps.items() if number]
    return ArmResult(
        arm=arm.title,
        seed=job.seed,
        sampled={str(number): _mean_sampled_success(steps, number) for number in greedy if number},
        greedy={str(number): value for number, value in greedy.items()},
        entropy=round([step["entropy"] for step in steps.values() if "entropy" in step][-1], 4),
        reward=reward,
    )


def _mean_sampled_success(steps: Mapping[int, StepMetrics], last: int) -> float:
    success = [steps[number]["success/sampled"] for number in range(max(1, last - SAMPLED_STEPS + 1), last + 1)]
    return round(sum(success) / len(success), 4)


def format_results(results: Sequence[ArmResult], about: Mapping[str, str]) -> str:
    """The results as Markdown."""
    steps = list(results[0].sampled)
    lines = [f"{name}: {value}  " for name, value in about.items()]
    lines += ["", f"| | seed | {' | '.join(f'step {step}' for step in steps)} | entropy at the end |"]
    lines.append("|---|--:|" + "--:|" * (len(steps) + 1))
    for arm in ARMS:
        for result in results:
            if result.arm == arm.title:
                cells = [f"{result.sampled[step]:.2f} / {result.greedy[step]:.2f}" for step in steps]
                lines.append(f"| {result.arm} | {result.seed} | {' | '.join(cells)} | {result.entropy:.3f} |")
    success = f"sampled over the rollouts of the last {SAMPLED_STEPS} steps / greedy on {EVAL_TASKS} held-out tasks"
    entropy = "Entropy is of the trained tokens, those of tools included where they are trained"
    return "\n".join([*lines, "", f"Success: {success}. {entropy}."]) + "\n"


def describe_environment() -> dict[str, str]:
    """Date, machine and versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}",
        "job": "the default job, apart from what the row says",
    }


if __name__ == "__main__":
    main()
