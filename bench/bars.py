"""The default job on five seeds, as a user runs it: success before and after, and what it cost, beside the bars.

python bench/bars.py                       # writes bench/results/bars.{json,md}; ends with 1 where a bar is missed
python bench/bars.py --job second          # the second task; writes bench/results/second.{json,md}
python bench/bars.py --job sight           # the model that sees, on three seeds; writes bench/results/sight.{json,md}
python bench/bars.py --seeds 0 --steps 5   # whether everything still runs; nothing is written without --out
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import subprocess
import sys
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import yaml  # noqa: E402
from looking import controls  # noqa: E402
from PIL import Image  # noqa: E402

from trainer.run.file import Rollouts  # noqa: E402
from trainer.run.history import NAME as METRICS  # noqa: E402
from trainer.run.history import history  # noqa: E402
from trainer.run.rollout import Rollout  # noqa: E402
from trainer.stage import template_of  # noqa: E402
from trainer.train.checkpoint import Checkpoints  # noqa: E402
from trainer.train.compare import FOLDER, WAYS  # noqa: E402
from trainer.train.folder import settings_of  # noqa: E402
from trainer.view.text import said  # noqa: E402

JOBS = ROOT / "trainer" / "jobs"
RESULTS = ROOT / "bench" / "results"
SEEDS = {"default": (0, 1, 2, 3, 4), "second": (0, 1, 2, 3, 4), "sight": (0, 1, 2)}
PATIENCE_S = 1800.0
SCALE = 8
"""Of a picture of which a pixel is hard to see."""
SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
TITLES = {"warm_core_s": "warm start, core-s", "grpo_core_s": "GRPO, core-s"}
CONTROLS = {
    "core_s": "core-s in all",
    "blank": "right, pictures blanked",
    "exchanged": "right, pictures of the neighbouring house",
    "follows": "as those pictures have it",
}
"""Of the model that sees; see `bench/looking.py`."""
SHOWN = ("mtrl", "torch", "transformers", "mcp")


@dataclass(frozen=True, slots=True)
class Bar:
    """What each seed must come to."""

    figure: str
    sign: str
    bound: float

    def kept(self, value: float) -> bool:
        return SIGNS[self.sign](value, self.bound)

    def worst(self, values: Sequence[float]) -> float:
        return max(values) if self.sign.startswith("<") else min(values)


COST = (Bar("warm_core_s", "<=", 90), Bar("grpo_core_s", "<=", 150))
BARS = {
    "default": (
        Bar("sampled_before", "<=", 0.25), Bar("greedy_before", "<=", 0.35),
        Bar("sampled", ">=", 0.9), Bar("greedy", ">=", 0.9), *COST,
    ),
    "second": (Bar("greedy_before", "<", 0.5), Bar("greedy", ">", 0.85)),
    "sight": (
        Bar("sampled_before", "<=", 0.35), Bar("greedy_before", "<=", 0.35),
        Bar("sampled", ">=", 0.85), Bar("greedy", ">=", 0.85), Bar("core_s", "<=", 600),
        Bar("blank", "<=", 0.25), Bar("exchanged", "<=", 0.25), Bar("follows", ">=", 0.85),
    ),
}  # fmt: skip
NAMES = {"default": "bars", "second": "second", "sight": "sight"}
"""What a job's results are called."""
HEADS = {"default": "The default job", "second": "The second task", "sight": "The job that learns to look"}
READ = {"default": "move", "second": "", "sight": ""}
"""The kind of task of which a rollout is shown."""


@dataclass(frozen=True, slots=True)
class Seed:
    seed: int
    warm_core_s: float
    grpo_core_s: float
    compared: Mapping[str, Any]
    """What `mtrl-train eval --json` says."""
    curve: Mapping[str, Any]
    read: Mapping[str, Any]
    """One task, before and after, as pairs of who wrote and what."""
    controls: Mapping[str, float] = field(default_factory=dict)
    """What is right where pictures show something else, if there are pictures."""

    @property
    def core_s(self) -> float:
        return self.warm_core_s + self.grpo_core_s

    def figure(self, name: str) -> float:
        told = {**self.compared, **self.controls}
        return float(told[name] if name in told else getattr(self, name))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--job", choices=BARS, default="default")
    options.add_argument("--seeds", type=int, nargs="+", help="all of the job's by default")
    options.add_argument("--steps", type=int, help="fewer than the job's own")
    options.add_argument("--out", type=Path, metavar="DIR", help="where the results go; of a full run, bench/results")
    asked = options.parse_args()
    seeds = asked.seeds or SEEDS[asked.job]
    whole = asked.steps is None and set(seeds) >= set(SEEDS[asked.job])
    out = asked.out or (RESULTS if whole else None)
    about = _about(asked.job)
    found: list[Seed] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(trained(asked.job, seed, asked.steps, Path(folder), READ[asked.job]))
        print(_line(found[-1]), file=sys.stderr, flush=True)
        if out is not None:
            _write(out / NAMES[asked.job], asked.job, found, about)
    print(told(asked.job, found, about))
    return int(not all(bar.kept(one.figure(bar.figure)) for bar in BARS[asked.job] for one in found))


def trained(job: str, seed: int, steps: int | None, folder: Path, kind: str) -> Seed:
    """A dry run makes the model and nothing else, so the warm start is what it takes; a run is GRPO.

    Both have their own start in it, imports and servers; GRPO has its looks on the way as well. The comparison at the
    end, which is no part of learning, is asked for by itself.
    """
    run, file = folder / "run", folder / f"{job}.yaml"
    settings = yaml.safe_load((JOBS / file.name).read_text(encoding="utf-8"))
    settings["evaluation"]["after"] = False
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    asked = ["--tools", str(ROOT / "tool_configs"), "--config", str(file), "--seed", str(seed)]
    _, warm = _ran([*asked, "--dry-run"], folder)
    _, grpo = _ran([*asked, "--out", str(run), *([] if steps is None else ["--steps", str(steps)])], folder)
    compared, _ = _ran(["eval", str(run), "--json"], folder)
    others = controls(run) if job == "sight" else {}
    return Seed(seed, round(warm, 1), round(grpo, 1), json.loads(compared), _curve(run), _read(run, kind), others)


def _ran(asked: Sequence[str], cache: Path) -> tuple[str, float]:
    """What it said, and the CPU of it and of all that it started: whoever ends leaves that with who waited for it."""
    before = getrusage(RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "trainer.cli", *asked]
    alone = {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    env = os.environ | alone
    ran = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    after = getrusage(RUSAGE_CHILDREN)
    if ran.returncode != 0:
        raise RuntimeError(f"mtrl-train {' '.join(asked)}: {ran.returncode}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return ran.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _curve(run: Path) -> dict[str, Any]:
    steps = history(run / METRICS)
    return {
        "reward": [round(step["reward/mean"], 4) for step in steps if "reward/mean" in step],
        "greedy": {str(int(step["step"])): step["eval/greedy"] for step in steps if "eval/greedy" in step},
    }


def _read(run: Path, kind: str) -> dict[str, Any]:
    """The first held-out task of the kind that is wrong before and right after, by the likeliest tokens."""
    before, after = (
        {one.task: one for one in Rollouts(run / FOLDER / way) if one.task.startswith(kind)}
        for way in ("greedy_before", "greedy")
    )
    learned = [task for task, one in after.items() if one.reward == 1 and before[task].reward != 1]
    kept = Checkpoints(run).latest()
    if not learned or kept is None:
        return {}
    decode = template_of(kept.folder, settings_of(run).template).tokens.decode

    def pairs(rollout: Rollout) -> list[tuple[str, str]]:
        return [(str(entry.author), said(entry, decode)) for entry in rollout.ledger]

    task = learned[0]
    pictures = [b64encode(image.data).decode() for image in after[task].ledger.images]
    return {"task": task, "before": pairs(before[task]), "after": pairs(after[task]), "pictures": pictures}


def _write(file: Path, job: str, found: Sequence[Seed], about: Mapping[str, str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".md").write_text(f"# {HEADS[job]}, seed by seed\n\n{told(job, found, about)}")
    if pictures := found[0].read.get("pictures"):
        beside(pictures).save(file.with_suffix(".png"), optimize=True)
    seeds = [asdict(one) for one in found]
    bars = [asdict(bar) for bar in BARS[job]]
    file.with_suffix(".json").write_text(json.dumps({"about": about, "bars": bars, "seeds": seeds}, indent=1) + "\n")


def beside(pictures: Sequence[str]) -> Image.Image:
    """What was seen, in order, each pixel large enough for a person."""
    seen = [Image.open(BytesIO(b64decode(one))).convert("RGB") for one in pictures]
    large = [one.resize((SCALE * one.width, SCALE * one.height), Image.Resampling.NEAREST) for one in seen]
    strip = Image.new(
        "RGB", (sum(one.width + SCALE for one in large) - SCALE, max(one.height for one in large)), "white"
    )
    for place, one in enumerate(large):
        strip.paste(one, (sum(before.width + SCALE for before in large[:place]), 0))
    return strip


def told(job: str, found: Sequence[Seed], about: Mapping[str, str]) -> str:
    lines = [f"{name}: {value}  " for name, value in about.items()]
    heads = [way.replace("_", " ") if "before" in way else f"{way} after" for way in WAYS]
    lines += ["", f"| seed | {' | '.join([*heads, *TITLES.values()])} |", "|--:|" + "--:|" * 6, *map(_line, found)]
    if job == "sight":
        lines += ["", f"| seed | {' | '.join(CONTROLS.values())} |", "|--:|" + "--:|" * len(CONTROLS)]
        lines += [f"| {one.seed} | {' | '.join(f'{one.figure(name):.3g}' for name in CONTROLS)} |" for one in found]
    lines += ["", "| every seed | worst | |", "|---|--:|---|", *_judged(BARS[job], found)]
    lines += ["", "Reward of each step, seed by seed:", "", "```text"]
    lines += [" ".join(f"{reward:.2f}" for reward in one.curve["reward"]) for one in found]
    return "\n".join([*lines, "```", *_shown(found[0].read)]) + "\n"


def _line(one: Seed) -> str:
    cells = [f"{one.figure(way):.3f} [{', '.join(f'{end:.2f}' for end in _ends(one, way))}]" for way in WAYS]
    return f"| {one.seed} | {' | '.join(cells)} | {one.warm_core_s:.0f} | {one.grpo_core_s:.0f} |"


def _ends(one: Seed, way: str) -> Sequence[float]:
    ends: Sequence[float] = one.compared["intervals"][way]
    return ends


def _judged(bars: Sequence[Bar], found: Sequence[Seed]) -> Iterator[str]:
    for bar in bars:
        worst = bar.worst([one.figure(bar.figure) for one in found])
        title = {**TITLES, **CONTROLS}.get(bar.figure, bar.figure.replace("_", " "))
        yield f"| {title} {bar.sign} {bar.bound:g} | {worst:g} | {'met' if bar.kept(worst) else '**missed**'} |"


def _shown(read: Mapping[str, Any]) -> Iterator[str]:
    for way in ("before", "after") if read else ():
        yield from ("", f"The task `{read['task']}`, {way}:", "", "```text")
        for author, text in read[way]:
            first, *more = text.strip("\n").splitlines() or [""]
            yield from (f"{author:<9}{first}", *(f"{'':9}{line}" for line in more))
        yield "```"


def _about(job: str) -> dict[str, str]:
    load = os.getloadavg()[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread; load {load:.1f} before the run",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in SHOWN)}",
        "job": f"`mtrl-train --tools tool_configs/ --config {job} --seed N`, then `mtrl-train eval`",
        "core-s": "of whole processes with all that they start, imports included",
    }


if __name__ == "__main__":
    raise SystemExit(main())
