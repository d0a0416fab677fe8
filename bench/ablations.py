"""What two of its parts do for the default job: masking what tools wrote, and who is credited, turn or whole rollout.

python bench/ablations.py                      # some minutes; writes bench/results/ablations.{json,md}
python bench/ablations.py --seeds 0 --steps 2  # whether everything still runs; nothing is written without --out
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

from trainer.learn.lesson import Draft, Lesson, lesson  # noqa: E402
from trainer.run.history import NAME as METRICS  # noqa: E402
from trainer.run.history import Measured, history  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402
from trainer.train.start import train  # noqa: E402

JOB = ROOT / "trainer" / "jobs" / "default.yaml"
RESULTS = ROOT / "bench" / "results"
SEEDS = (0, 1)
EVERY = 10
TASKS = 100
"""Of a look, by the likeliest tokens, on held-out tasks."""
NEAR = 5
"""Steps up to a look, of whose rollouts success is told sampled. No task of the job comes twice."""
SHOWN = ("mtrl", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Arm:
    title: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    everything: bool = False
    """Whether what tools and feedback wrote is trained as if the policy had written it."""

    @property
    def patched(self) -> AbstractContextManager[Any]:
        return patch("trainer.train.loop.lesson", unmasked) if self.everything else nullcontext()


ARMS = (
    Arm("as it is: the policy's own tokens, credited with the outcome"),
    Arm("tools' and feedback's tokens trained too", everything=True),
    Arm("credit by turn, against siblings that got as far", {"credit": {"kind": "turns"}}),
)


@dataclass(frozen=True, slots=True)
class Trained:
    arm: str
    seed: int
    sampled: Mapping[str, float]
    """By step: the share of right rollouts in the few steps up to it."""
    greedy: Mapping[str, float]
    """By step, from 0 on."""
    entropy: float
    """At the end, nats a token."""
    reward: Sequence[float]


def unmasked(*given: Any) -> Lesson:
    """A lesson in which all that follows the prompt counts as what the policy wrote, in the turn before it."""
    made = lesson(*given)
    return replace(made, drafts=tuple(map(everything, made.drafts)))


def everything(draft: Draft) -> Draft:
    turns = list(accumulate(draft.turns, _latest))
    mask = [turn >= 0 for turn in turns]
    return replace(draft, mask=mask, turns=turns, weights=[float(one) for one in mask])


def _latest(before: int, own: int) -> int:
    return own if own >= 0 else before


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options.add_argument("--steps", type=int, help="fewer than the job's own")
    options.add_argument("--out", type=Path, metavar="DIR", help="where the results go; of a full run, bench/results")
    asked = options.parse_args()
    out = asked.out or (None if asked.steps else RESULTS)
    torch.set_num_threads(1)
    about, found = _about(), []
    for seed in asked.seeds:
        for arm in ARMS:
            found.append(trained(arm, settings(arm, seed, asked.steps)))
            print(f"seed {seed}, {arm.title}: greedy {found[-1].greedy}", file=sys.stderr, flush=True)
            if out is not None:
                _write(out, found, about)
    print(told(found, about))


def _write(out: Path, found: Sequence[Trained], about: Mapping[str, str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "ablations.md").write_text("# Two parts of learning, with and without\n\n" + told(found, about))
    whole = {"about": about, "trained": [asdict(one) for one in found]}
    (out / "ablations.json").write_text(json.dumps(whole, indent=1) + "\n")


def settings(arm: Arm, seed: int, steps: int | None) -> TrainSettings:
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    job["evaluation"] = {"every": EVERY, "few": TASKS, "rows": TASKS}
    job["algorithm"] |= arm.changes
    fewer = {} if steps is None else {"steps": steps}
    same = {"tools": str(ROOT / "tool_configs"), "record": False, "seed": seed}
    return TrainSettings.model_validate(job | same | fewer)


def trained(arm: Arm, job: TrainSettings) -> Trained:
    """In a folder that is gone afterwards; the model is made once for each seed, and kept where a user's is."""

    async def run(folder: Path) -> None:
        await train(job, folder, Console(quiet=True))

    with tempfile.TemporaryDirectory() as folder, arm.patched:
        anyio.run(run, Path(folder) / "run")
        steps = {int(step["step"]): step for step in history(Path(folder) / "run" / METRICS)}
    looked = {number: step["eval/greedy"] for number, step in steps.items() if "eval/greedy" in step}
    reward = [round(step["reward/mean"], 4) for number, step in steps.items() if number]
    return Trained(
        arm=arm.title,
        seed=job.seed,
        sampled={str(number): _sampled(steps, number) for number in looked if number},
        greedy={str(number): value for number, value in looked.items()},
        entropy=round([step["entropy"] for step in steps.values() if "entropy" in step][-1], 4),
        reward=reward,
    )


def _sampled(steps: Mapping[int, Measured], number: int) -> float:
    near = [steps[one]["success/sampled"] for one in range(max(1, number - NEAR + 1), number + 1)]
    return round(sum(near) / len(near), 4)


def told(found: Sequence[Trained], about: Mapping[str, str]) -> str:
    looks = list(found[0].sampled)
    lines = [f"{name}: {value}  " for name, value in about.items()]
    lines += ["", f"| | seed | {' | '.join(f'step {look}' for look in looks)} | entropy at the end |"]
    lines.append("|---|--:|" + "--:|" * (len(looks) + 1))
    for arm in ARMS:
        for one in found:
            if one.arm == arm.title:
                cells = [f"{one.sampled[look]:.2f} / {one.greedy[look]:.2f}" for look in looks]
                lines.append(f"| {one.arm} | {one.seed} | {' | '.join(cells)} | {one.entropy:.3f} |")
    means = f"of {NEAR} steps' rollouts up to there, and of {TASKS} held-out tasks by the likeliest tokens"
    entropy = "Entropy is of the tokens that are trained: where tools' are, of theirs too"
    return "\n".join([*lines, "", f"Success sampled / greedy: {means}. {entropy}."]) + "\n"


def _about() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in SHOWN)}",
        "job": "the default job but for what the row says",
    }


if __name__ == "__main__":
    main()
