"""What more processes bring, in ratios: ranks, rollout workers, ways to publish.

python bench/scale_up.py                # about twelve minutes on two cores; writes bench/results/scale.{json,md}
python bench/scale_up.py --only ranks   # one part; the others stay as they are in the results
python bench/scale_up.py --small        # smoke test; writes nothing without --out

All numbers are of one run on one machine, and are compared with each other: a step of N ranks with what the cores
allow, N workers with one, adapters with merged weights. A part that fails is named in the results, and the others are
measured all the same. Publishing needs SGLang (`make sglang`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import anyio  # noqa: E402

from bench import workers  # noqa: E402
from bench.rank_scaling import measure_ranks  # noqa: E402
from bench.scale_up_table import check_promises, format_results  # noqa: E402
from gateway.errors import format_error, unwrap_error  # noqa: E402

RESULTS = ROOT / "bench" / "results"
RANKS, STEPS = (1, 2, 4), 5
WORKERS = workers.Size(rollouts=128, turns=8, under_way=(1000, 10_000), paced=(1, 2, 4), paced_rollouts=48)
PART_S = 900.0
PARTS = ("ranks", "workers", "publish")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a smoke test")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="measure these, and keep the others")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for scale.json and scale.md")
    options = parser.parse_args()
    measures: Mapping[str, Callable[[], Any]] = {
        "ranks": partial(measure_rank_paces, (1, 2) if options.small else RANKS, 1 if options.small else STEPS),
        "workers": partial(measure_workers, workers.SMALL if options.small else WORKERS),
        "publish": partial(measure_publish, options.small),
    }
    out = options.out or (None if options.small else RESULTS)
    content: dict[str, Any] = {}
    if out is not None and (out / "scale.json").exists():
        content = json.loads((out / "scale.json").read_text())
    for name in options.only:
        content[name] = run_part(name, measures[name])
        if out is not None:
            write_results(content, out)
    print(format_results(content))
    return int(any("problem" in content[name] for name in options.only))


def run_part(name: str, measure: Callable[[], Any]) -> dict[str, Any]:
    """Measures a part; returns its results with date, versions and seconds, or why there are none."""
    print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        part = {"found": measure()}
    except Exception as error:
        traceback.print_exc()
        part = {"problem": format_error(unwrap_error(error))[:500]}
    return {"about": describe_machine(), "seconds": round(time.monotonic() - began), **part}


def write_results(content: dict[str, Any], out: Path) -> None:
    """Writes scale.json and scale.md."""
    out.mkdir(parents=True, exist_ok=True)
    content["promises"] = check_promises(content)
    (out / "scale.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "scale.md").write_text(format_results(content))


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


def measure_publish(is_small: bool) -> Any:
    """Adapters alone against merged weights, on an SGLang server."""
    with TemporaryDirectory(prefix="mtrl-publish-") as folder:
        out, size = Path(folder) / "publish.json", ["--small"] if is_small else []
        run_script("publish.py", *size, "--models", "qwen3", "--no-restart", "--out", str(out))
        return json.loads(out.read_text())["found"]["qwen3"]


def run_script(name: str, *words: str) -> str:
    """Runs a measurement in a process of its own; returns what it prints."""
    command = [sys.executable, str(ROOT / "bench" / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PART_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def describe_machine() -> dict[str, str]:
    """The date, the machine with its load, and versions."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f} at the end"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "versions": f"Python {platform.python_version()}, {packages}",
    }


if __name__ == "__main__":
    raise SystemExit(main())
