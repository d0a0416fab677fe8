"""What more processes bring, in ratios: ranks, rollout workers, plans against measured steps, ways to publish.

python bench/scale_up.py           # about ten minutes; writes bench/results/scale_up.json
python bench/scale_up.py --small   # smoke test; writes nothing without --out

All numbers are of one run on one machine, and compare with each other: a step of N ranks with what the cores allow, N
workers with one, planned steps with measured ones. `bench/readme.py --write` puts them into docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402

from bench import workers  # noqa: E402
from bench.rank_scaling import measure_ranks  # noqa: E402

RESULT = ROOT / "bench" / "results" / "scale_up.json"
RANKS, STEPS = (1, 2, 4), 8
WORKERS = workers.Size(rollouts=256, turns=10, under_way=(1000, 10_000))
PUBLISH = ROOT / "bench" / "publish.py"
PART_S = 900.0
PARTS = ("ranks", "workers", "plan", "publish")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a smoke test")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="measure these, and keep the others")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    measures = {
        "ranks": partial(measure_rank_paces, (1, 2) if options.small else RANKS, 1 if options.small else STEPS),
        "workers": partial(measure_workers, workers.SMALL if options.small else WORKERS),
        "plan": partial(run_plan, options.small),
        "publish": partial(run_publish, options.small),
    }
    out = options.out or (None if options.small else RESULT)
    content: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {}
    for name in options.only:
        measured = measures[name]()
        if measured is not None:
            content[name] = {"about": describe_machine(), "rows": measured}
        print(json.dumps({name: measured}, indent=1), flush=True)
    if out is not None:
        out.write_text(json.dumps(content, indent=1) + "\n")


def measure_rank_paces(sizes: tuple[int, ...], steps: int) -> list[dict[str, float]]:
    """Seconds of a step by the number of ranks, and the floor of each."""
    return [
        {"ranks": pace.ranks, "step_s": pace.step_s, "floor_s": pace.floor_s, "ratio": pace.ratio}
        for pace in measure_ranks(sizes, steps)
    ]


def measure_workers(size: workers.Size) -> dict[str, Any]:
    """What turns cost with some workers, and the memory of rollouts."""
    with TemporaryDirectory(prefix="mtrl-workers-") as folder:
        measured = anyio.run(partial(workers.measure, size, Path(folder)))
    return {
        "paces": [pace_to_dict(pace) for pace in measured.paces],
        "paced": [pace_to_dict(pace) for pace in measured.paced],
        "kib": [{"workers": count, "rollouts": many, "kib": kib} for (count, many), kib in measured.kib.items()],
        "promises": workers.check_promises(measured, size),
    }


def pace_to_dict(pace: workers.Pace) -> dict[str, float]:
    return {
        "workers": pace.workers, "turns_per_s": pace.turns_per_s, "trainer_ms": pace.trainer_ms,
        "worker_ms": pace.worker_ms,
    }  # fmt: skip


def run_plan(is_small: bool) -> list[dict[str, Any]] | None:
    """Planned and measured steps, with an engine and updates that keep a set pace; None for a smoke test."""
    if is_small:
        return None
    with TemporaryDirectory(prefix="mtrl-plan-") as folder:
        run_script(ROOT / "bench" / "plan.py", "--paced", "--rounds", "1", "--steps", "8", "--out", folder)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "plan.json").read_text())["jobs"]
        return rows


def run_publish(is_small: bool) -> Any:
    """Ways to publish weights, where their measurement is there."""
    if not PUBLISH.exists():
        return None
    with TemporaryDirectory(prefix="mtrl-publish-") as folder:
        run_script(PUBLISH, *(["--small"] if is_small else []), "--out", folder)
        return json.loads(next(Path(folder).glob("*.json")).read_text())


def run_script(script: Path, *words: str) -> None:
    """Runs a measurement in a process of its own."""
    subprocess.run([sys.executable, str(script), *words], check=True, timeout=PART_S)


def describe_machine() -> str:
    """The date, the machine and its load."""
    load = os.getloadavg()[0]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return f"{time.strftime('%Y-%m-%d')}, {machine}; load {load:.1f} at the end"


if __name__ == "__main__":
    main()
