"""Trains the demo jobs on several seeds as a user does, and checks success and cost against bars.

python bench/bars.py                       # writes bench/results/bars.{json,md}; exits with 1 if a bar is missed
python bench/bars.py --job second          # the second task; writes bench/results/second.{json,md}
python bench/bars.py --job sight           # the vision job, on three seeds; writes bench/results/sight.{json,md}
python bench/bars.py --job agent           # the job with an agent, on three seeds; writes bench/results/agent.{json,md}
python bench/bars.py --job mcp-tasks       # tasks made from an MCP server; writes bench/results/mcp-tasks.{json,md}
python bench/bars.py --job shell           # shell tasks in boxes, on three seeds; writes bench/results/shell.{json,md}
python bench/bars.py --seeds 0 --steps 5   # smoke test; writes nothing without --out
python bench/bars.py --job agent --seeds 2 --out DIR --add   # keeps the other seeds that DIR has
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
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import yaml  # noqa: E402
from image_controls import run_controls  # noqa: E402
from PIL import Image  # noqa: E402

from trainer.rollout.rollout import Rollout  # noqa: E402
from trainer.setup import load_template  # noqa: E402
from trainer.storage.rollout_file import Rollouts  # noqa: E402
from trainer.storage.run_files import METRICS_FILE as METRICS  # noqa: E402
from trainer.storage.run_files import read_metrics  # noqa: E402
from trainer.train.checkpoint import Checkpoints  # noqa: E402
from trainer.train.evaluate import EVALUATION_FOLDER, VARIANTS  # noqa: E402
from trainer.train.run_folder import load_run_settings  # noqa: E402
from trainer.view.text import entry_text  # noqa: E402

JOBS = ROOT / "mtrl_plugins" / "demo" / "jobs"
RESULTS = ROOT / "bench" / "results"
SEEDS = {
    "default": (0, 1, 2, 3, 4),
    "second": (0, 1, 2, 3, 4),
    "sight": (0, 1, 2),
    "agent": (0, 1, 2),
    "mcp-tasks": (0, 1, 2),
    "shell": (0, 1, 2),
}
TIMEOUT_S = 7200.0
IMAGE_SCALE = 8
"""The images are tiny; each pixel is enlarged to this size."""
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip
TITLES = {"warm_core_s": "warm start, core-s", "grpo_core_s": "GRPO, core-s"}
BAR_TITLES = {name: f"{title}, of the bars' core" for name, title in TITLES.items()}
CONTROL_TITLES = {
    "core_s": "core-s in all, of the bars' core",
    "blank": "right, images blanked",
    "exchanged": "right, images of the neighbouring house",
    "follows": "answer follows those images",
}
"""The control experiments of the vision job; see `bench/image_controls.py`."""
PACKAGES = ("mtrl-rl", "torch", "transformers", "mcp")


@dataclass(frozen=True, slots=True)
class Bar:
    """A bound that a figure of every seed must meet."""

    figure: str
    sign: str
    bound: float

    def is_met(self, value: float) -> bool:
        return OPERATORS[self.sign](value, self.bound)

    def worst(self, values: Sequence[float]) -> float:
        return max(values) if self.sign.startswith("<") else min(values)


REFERENCE_S = 0.02
"""Processor time of a million additions in Python on the core of which bars of cost speak."""
MOST_SLOWNESS = 4.0
"""What a core is forgiven at most."""
COST = (Bar("warm_core_s", "<=", 90), Bar("grpo_core_s", "<=", 150))
BARS = {
    "default": (
        Bar("sampled_before", "<=", 0.25), Bar("greedy_before", "<=", 0.35),
        Bar("sampled", ">=", 0.9), Bar("greedy", ">=", 0.9), *COST,
    ),
    "second": (Bar("greedy_before, renamed_thrice", "<", 0.5), Bar("greedy", ">", 0.85)),
    "agent": (
        Bar("sampled_before", "<=", 0.25), Bar("greedy_before", "<=", 0.35),
        Bar("sampled", ">=", 0.85), Bar("greedy", ">=", 0.85), Bar("core_s", "<=", 200),
    ),
    "mcp-tasks": (
        Bar("sampled_before", "<=", 0.35), Bar("greedy_before", "<=", 0.35),
        Bar("sampled", ">=", 0.8), Bar("greedy", ">=", 0.8),
    ),
    "shell": (
        Bar("sampled_before", "<=", 0.35), Bar("greedy_before", "<=", 0.35),
        Bar("sampled", ">=", 0.8), Bar("greedy", ">=", 0.8),
    ),
    "sight": (
        Bar("sampled_before", "<=", 0.35), Bar("greedy_before", "<=", 0.35),
        Bar("sampled", ">=", 0.85), Bar("greedy", ">=", 0.85), Bar("core_s", "<=", 600),
        Bar("blank", "<=", 0.25), Bar("exchanged", "<=", 0.25), Bar("follows", ">=", 0.85),
    ),
}  # fmt: skip
RESULT_NAMES = {job: "bars" if job == "default" else job for job in SEEDS}
"""File names of the results, by job."""
PAGE_TITLES = {
    "default": "The default job", "second": "The second task", "sight": "The vision job", "agent": "The agent job",
    "mcp-tasks": "Tasks made from an MCP server", "shell": "Shell tasks in boxes",
}  # fmt: skip
SHOWN_KIND = {"default": "move", "agent": "move", "shell": "append-found"}
"""The kind of task of which a rollout is shown."""


@dataclass(frozen=True, slots=True)
class Seed:
    """The results of one seed."""

    seed: int
    warm_core_s: float
    grpo_core_s: float
    compared: Mapping[str, Any]
    """The output of `mtrl-train eval --json`."""
    curve: Mapping[str, Any]
    read: Mapping[str, Any]
    """One task's rollouts before and after training, as pairs of author and text."""
    controls: Mapping[str, float] = field(default_factory=dict)
    """The control experiments of the vision job."""
    slowness: float = 1.0
    """How many times longer a core took for the same than that of which the bars speak, meanwhile."""

    @property
    def core_s(self) -> float:
        return self.warm_core_s + self.grpo_core_s

    def figure(self, name: str) -> float:
        """A figure by its name, of all tasks or of a kind; core-seconds are those of the bars' core."""
        kinds = self.compared.get("by_kind", {})
        of_kinds = {f"{name}, {kind}": rates[name] for kind, rates in kinds.items() for name in rates}
        figures = {**self.compared, **self.controls, **of_kinds}
        return float(figures[name]) if name in figures else round(getattr(self, name) / self.slowness, 1)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--job", choices=BARS, default="default")
    options.add_argument("--seeds", type=int, nargs="+", help="all of the job's by default")
    options.add_argument("--steps", type=int, help="fewer than the job's own")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    options.add_argument("--add", action="store_true", help="keep the other seeds that the results have")
    args = options.parse_args()
    numbers = args.seeds or SEEDS[args.job]
    is_full_run = args.steps is None and set(numbers) >= set(SEEDS[args.job])
    out = args.out or (RESULTS if is_full_run else None)
    about = describe_environment(args.job)
    about["bars' core"] = f"adds a million numbers in Python in {REFERENCE_S} s; column `slower` compares with it"
    seeds: list[Seed] = []
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            seeds.append(train_seed(args.job, number, args.steps, Path(folder), SHOWN_KIND.get(args.job, "")))
        print(_format_seed(seeds[-1]), file=sys.stderr, flush=True)
        if out is not None:
            file = out / RESULT_NAMES[args.job]
            seeds = add_seeds(file, seeds) if args.add else seeds
            _write_results(file, args.job, seeds, about)
    print(format_results(args.job, seeds, about))
    return int(not all(bar.is_met(seed.figure(bar.figure)) for bar in BARS[args.job] for seed in seeds))


def train_seed(job: str, seed: int, steps: int | None, folder: Path, kind: str) -> Seed:
    """Measures the warm start by a dry run, which builds the model and nothing else, then GRPO by a run.

    Both include their own start: imports and servers. GRPO includes the evaluations on the way, but not the comparison
    at the end, which is run on its own.
    """
    run, file = folder / "run", folder / f"{job}.yaml"
    settings = yaml.safe_load((JOBS / file.name).read_text(encoding="utf-8"))
    settings["evaluation"]["after"] = False
    if "mcp" in settings:
        settings["mcp"] = str((JOBS / settings["mcp"]).resolve())
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    tools = [] if {"tools", "environment"} & {*settings} else ["--tools", str(ROOT / "tool_configs")]
    args = [*tools, "--config", str(file), "--seed", str(seed)]
    slowness = [measure_slowness()]
    _, warm = run_command([*args, "--dry-run"], folder)
    slowness.append(measure_slowness())
    _, grpo = run_command([*args, "--out", str(run), *([] if steps is None else ["--steps", str(steps)])], folder)
    slowness.append(measure_slowness())
    output, _ = run_command(["eval", str(run), "--json"], folder)
    controls = run_controls(run) if job == "sight" else {}
    curve, rollouts = _read_curves(run), _read_rollouts(run, kind)
    costs = round(warm, 1), round(grpo, 1)
    return Seed(seed, *costs, json.loads(output), curve, rollouts, controls, round(fmean(slowness), 2))


def measure_slowness() -> float:
    """How many times longer a million additions take here and now than on the core of which the bars speak: the median
    of ten times."""

    def add() -> float:
        began, total = time.process_time(), 0
        for number in range(1_000_000):
            total += number
        return time.process_time() - began

    return min(MOST_SLOWNESS, median(add() for _ in range(10)) / REFERENCE_S)


def run_command(args: Sequence[str], cache: Path, *, cwd: Path = ROOT, threads: int = 1) -> tuple[str, float]:
    """Runs `mtrl-train`; returns its output and the CPU seconds of the process and its descendants."""
    before = getrusage(RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "trainer.cli", *args]
    changes = {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    env = os.environ | changes | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
    after = getrusage(RUSAGE_CHILDREN)
    if done.returncode != 0:
        output = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        raise RuntimeError(f"mtrl-train {' '.join(args)} ended with {done.returncode}:\n{output}")
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def train_seeds(
    name: str, seeds: Sequence[int], train: Callable[[int, Path], Any], about: Mapping[str, str], out: Path | None
) -> None:
    """Trains each seed in a folder of its own; prints what came of it, and writes all to a folder if it is given."""
    found: list[Any] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(train(seed, Path(folder)))
        print(json.dumps(found[-1]), flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(json.dumps({"about": about, "seeds": found}, indent=1) + "\n")


def _read_curves(run: Path) -> dict[str, Any]:
    steps = read_metrics(run / METRICS)
    return {
        "reward": [round(step["reward/mean"], 4) for step in steps if "reward/mean" in step],
        "greedy": {str(int(step["step"])): step["eval/greedy"] for step in steps if "eval/greedy" in step},
    }


def _read_rollouts(run: Path, kind: str) -> dict[str, Any]:
    """The first held-out task of a kind that is wrong before and right after, by greedy decoding."""
    before, after = (
        {
            item.task: item
            for item in Rollouts(run / EVALUATION_FOLDER / variant)
            if item.task.lstrip("0123456789-").startswith(kind)
        }
        for variant in ("greedy_before", "greedy")
    )
    learned = [task for task, rollout in after.items() if rollout.reward == 1 and before[task].reward != 1]
    checkpoint = Checkpoints(run).find_latest()
    if not learned or checkpoint is None:
        return {}
    decode = load_template(checkpoint.folder, load_run_settings(run).template).tokenizer.decode

    def pairs(rollout: Rollout) -> list[tuple[str, str]]:
        return [(str(entry.author), entry_text(entry, decode)) for entry in rollout.ledger]

    task = learned[0]
    images = [b64encode(image.data).decode() for image in after[task].ledger.images]
    return {"task": task, "before": pairs(before[task]), "after": pairs(after[task]), "pictures": images}


def add_seeds(file: Path, seeds: Sequence[Seed]) -> list[Seed]:
    """The seeds with the others that a results file has, in order."""
    record = file.with_suffix(".json")
    earlier = json.loads(record.read_text(encoding="utf-8"))["seeds"] if record.exists() else []
    by_number = {item["seed"]: Seed(**item) for item in earlier} | {seed.seed: seed for seed in seeds}
    return [by_number[number] for number in sorted(by_number)]


def _write_results(file: Path, job: str, seeds: Sequence[Seed], about: Mapping[str, str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".md").write_text(f"# {PAGE_TITLES[job]}, seed by seed\n\n{format_results(job, seeds, about)}")
    if images := seeds[0].read.get("pictures"):
        join_images(images).save(file.with_suffix(".png"), optimize=True)
    bars = [asdict(bar) for bar in BARS[job]]
    content = {"about": about, "bars": bars, "seeds": [asdict(seed) for seed in seeds]}
    file.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")


def join_images(encoded: Sequence[str]) -> Image.Image:
    """The images side by side, enlarged."""
    images = [Image.open(BytesIO(b64decode(text))).convert("RGB") for text in encoded]
    enlarged = [
        image.resize((IMAGE_SCALE * image.width, IMAGE_SCALE * image.height), Image.Resampling.NEAREST)
        for image in images
    ]
    width = sum(image.width + IMAGE_SCALE for image in enlarged) - IMAGE_SCALE
    canvas = Image.new("RGB", (width, max(image.height for image in enlarged)), "white")
    left = 0
    for image in enlarged:
        canvas.paste(image, (left, 0))
        left += image.width + IMAGE_SCALE
    return canvas


def format_results(job: str, seeds: Sequence[Seed], about: Mapping[str, str]) -> str:
    """The results as Markdown."""
    lines = [f"{name}: {value}  " for name, value in about.items()]
    heads = [name.replace("_", " ") if "before" in name else f"{name} after" for name in VARIANTS]
    lines += ["", f"| seed | {' | '.join([*heads, *TITLES.values()])} | slower |", "|--:|" + "--:|" * 7]
    lines += map(_format_seed, seeds)
    if job == "sight":
        lines += ["", f"| seed | {' | '.join(CONTROL_TITLES.values())} |", "|--:|" + "--:|" * len(CONTROL_TITLES)]
        lines += [
            f"| {seed.seed} | {' | '.join(f'{seed.figure(name):.3g}' for name in CONTROL_TITLES)} |" for seed in seeds
        ]
    lines += ["", "| every seed | worst | |", "|---|--:|---|", *_format_bars(BARS[job], seeds)]
    lines += ["", "Reward of each step, seed by seed:", "", "```text"]
    lines += [" ".join(f"{reward:.2f}" for reward in seed.curve["reward"]) for seed in seeds]
    return "\n".join([*lines, "```", *_format_rollouts(seeds[0].read)]) + "\n"


def _format_seed(seed: Seed) -> str:
    cells = []
    for name in VARIANTS:
        interval = ", ".join(f"{end:.2f}" for end in seed.compared["intervals"][name])
        cells.append(f"{seed.figure(name):.3f} [{interval}]")
    cells += [f"{seed.warm_core_s:.0f}", f"{seed.grpo_core_s:.0f}", f"{seed.slowness:.1f}x"]
    return f"| {seed.seed} | {' | '.join(cells)} |"


def _format_bars(bars: Sequence[Bar], seeds: Sequence[Seed]) -> Iterator[str]:
    for bar in bars:
        worst = bar.worst([seed.figure(bar.figure) for seed in seeds])
        title = {**BAR_TITLES, **CONTROL_TITLES}.get(bar.figure, bar.figure.replace("_", " "))
        yield f"| {title} {bar.sign} {bar.bound:g} | {worst:g} | {'met' if bar.is_met(worst) else '**missed**'} |"


def _format_rollouts(rollouts: Mapping[str, Any]) -> Iterator[str]:
    for moment in ("before", "after") if rollouts else ():
        yield from ("", f"The task `{rollouts['task']}`, {moment}:", "", "```text")
        for author, text in rollouts[moment]:
            first, *more = text.strip("\n").splitlines() or [""]
            yield from (f"{author:<9}{first}", *(f"{'':9}{line}" for line in more))
        yield "```"


def describe_environment(job: str, threads: int = 1) -> dict[str, str]:
    """Date, machine, versions and commands."""
    load, used = os.getloadavg()[0], "one thread" if threads == 1 else f"{threads} threads"
    tools = "" if job in ("mcp-tasks", "shell") else "--tools tool_configs/ "
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {used}; load {load:.1f} before the run",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in PACKAGES)}",
        "job": f"`mtrl-train {tools}--config {job} --seed N`, then `mtrl-train eval`",
        "core-s": "CPU of whole processes and their children, imports included",
    }


if __name__ == "__main__":
    raise SystemExit(main())
