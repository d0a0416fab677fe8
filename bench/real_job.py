"""The job of `make real`: a real model learns to use tools, from its own successes and by GRPO; one table.

1. The model is tried on held-out word problems, without and with four worked examples before each question.
2. It is sampled with the examples, and learns its own successes without them (`mtrl-train sft --drop-examples`).
3. It is trained by GRPO, and tried again.

Each part is made once: after a stop, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import anyio
import typer
from anyio import to_thread

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fetch_model import PACKAGE, fetch_model
from rich.console import Console
from rich.table import Table
from word_problems import draw_examples, draw_problems, make_row

from gateway.disk_errors import write_atomically
from mtrl_plugins.demo.problem import Split
from trainer.cli.errors import report_errors
from trainer.policy.policy import Policy
from trainer.train.checkpoint import Checkpoints
from trainer.train.evaluate import Evaluation, SuccessRate, evaluate, save_rollouts
from trainer.train.job import open_job
from trainer.train.run_folder import RunFolder
from trainer.train.settings import TrainSettings
from trainer.train.start import train
from trainer.view.progress import RolloutProgress

HELD_OUT_SEED = 10**6
"""The seed of the held-out problems, whatever that of the training."""
JOB: dict[str, Any] = {
    "tools": "demo",
    "template": {"calls": "text", "sanity": "ignore_strippable"},
    "reward": {"components": {"answer": {"function": "answer"}}},
    "limits": {"assistant_turns": 4, "tool_calls": 4, "turn_tokens": 48, "rollout_tokens": 1536, "timeout_s": 3600},
    "algorithm": {"name": "grpo"},
    "engine": "auto",
}
SYSTEM_PACKAGES = ("mtrl-rl", "torch", "transformers", "mcp")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is sampled and trained."""

    held_out: int = 200
    training: int = 1024
    """Problems to train on: each part that trains or samples reads them all."""
    sampled: int = 480
    """Problems that are sampled with examples, each once."""
    temperature: float = 0.5
    """At which they are sampled: at 1, a fifth of the answers is right, and most of those need no tool."""
    start_epochs: int = 3
    start_batch: int = 16
    steps: int = 25
    prompts: int = 6
    """One of each kind: what a few steps lack is forgotten, and then no rollout of it has a reward to learn from."""
    n: int = 8
    lr: float = 2e-5


@dataclass
class RealJob:
    """The parts of the job, in a folder."""

    folder: Path
    model: Path
    seed: int
    size: Size
    console: Console

    async def run(self) -> dict[str, Any]:
        """Makes the parts that are missing; returns what came out."""
        self.write_rows()
        parts: dict[str, Any] = {}
        for examples in (False, True):
            name = f"before{'_with_examples' if examples else ''}"
            for greedy in (True, False):
                parts |= await self._measure(name, self.model, examples=examples, greedy=greedy)
        start, successes = await self.learn_successes()
        parts |= successes
        for greedy in (True, False):
            parts |= await self._measure("start", start, greedy=greedy)
        trained = await self._train_run("grpo", **self.grpo(start))
        for greedy in (True, False):
            parts |= await self._measure("after", trained, greedy=greedy)
        return parts

    def write_rows(self) -> None:
        """Writes the problems, with and without examples."""
        (self.folder / "rows").mkdir(parents=True, exist_ok=True)
        examples = draw_examples(self.seed)
        none: dict[str, list[dict[str, Any]]] = {}
        splits: Sequence[tuple[str, Split, int, int]] = (
            ("train", "train", self.seed, self.size.training),
            ("held_out", "held_out", HELD_OUT_SEED, self.size.held_out),
        )
        for name, split, seed, many in splits:
            for suffix, before in (("", none), ("_with_examples", examples)):
                rows = (
                    make_row(f"{name}-{number}", kind, problem, before.get(kind, []))
                    for number, (kind, problem) in enumerate(islice(draw_problems(seed, split), many))
                )
                text = "".join(f"{json.dumps(row)}\n" for row in rows)
                write_atomically(self.folder / "rows" / f"{name}{suffix}.jsonl", text.encode())

    def make_settings(self, **changes: Any) -> TrainSettings:
        """The settings of one part."""
        values = {**JOB, "seed": self.seed, "model": str(self.model), "data": self._rows("train"), **changes}
        return TrainSettings.model_validate(values)

    def _rows(self, name: str, *, examples: bool = False) -> str:
        return str(self.folder / "rows" / f"{name}{'_with_examples' if examples else ''}.jsonl")

    async def _measure(
        self, name: str, model: Path, *, examples: bool = False, greedy: bool, data: str = "held_out"
    ) -> dict[str, Any]:
        """Success of a model, and its rollouts, in a folder of their own."""
        name = f"{name}/{'greedy' if greedy else 'sampled'}"
        done, rows = self.folder / name / "result.json", self._rows(data, examples=examples)
        count = self.size.sampled if data == "train" else self.size.held_out
        found = json.loads(done.read_text()) if done.exists() else None
        if found is None or found["tried"] + found["lost"] != count:  # Or it is that of another size.
            done.parent.mkdir(parents=True, exist_ok=True)
            with measure_cost() as cost:
                sampling = {"temperature": self.size.temperature if data == "train" else 1.0}
                settings = self.make_settings(
                    model=str(model), evaluation={"data": rows, "rows": count}, sampling=sampling
                )
                played = await self._play(settings, done.parent, name, greedy=greedy)
            found = {**summarize(played), **cost}
            write_atomically(done, json.dumps(found).encode())
        return {name: found}

    async def _play(self, settings: TrainSettings, folder: Path, name: str, *, greedy: bool) -> Evaluation:
        log = partial(self.console.print, markup=False)
        async with open_job(settings) as job:
            policy = await to_thread.run_sync(Policy.load, job.model, job.settings.update)
            tasks = job.held_out(settings.evaluation.rows)
            progress = RolloutProgress(len(tasks), phase=name, console=self.console)
            async with job.make_engine(folder, policy, log) as engine:
                if engine.version:
                    await engine.publish(policy.weights, 0)
                with progress:
                    runner = job.make_runner(engine, progress)
                    runner = job.make_greedy(runner) if greedy else runner
                    found = await evaluate(runner, job.scorer, tasks, settings.concurrency)
        await to_thread.run_sync(save_rollouts, folder, found)
        return found

    async def learn_successes(self) -> tuple[Path, dict[str, Any]]:
        """The model after SFT on its own successes, and how many those were."""
        size = self.size
        found = await self._measure("successes", self.model, examples=True, greedy=False, data="train")
        ((name, result),) = found.items()
        steps = max(1, result["succeeded"] * size.start_epochs // size.start_batch)
        start = await self._train_run(
            "sft", data=str(self.folder / name), sft={"where": "answer >= 1", "drop_examples": True}, n=1, steps=steps,
            prompts=size.start_batch, algorithm={"name": "sft"}, update=self._update(steps),
        )  # fmt: skip
        return start, found

    def grpo(self, start: Path, *, examples: bool = False) -> dict[str, Any]:
        """The settings of the last part that are its own. With `examples`, those of a model that has learned nothing
        yet: without them, it solves none."""
        size = self.size
        evaluation = {"data": self._rows("held_out", examples=examples), "every": 0}
        return {
            "model": str(start), "steps": size.steps, "prompts": size.prompts, "n": size.n, "evaluation": evaluation,
            "curriculum": {"shuffle": False}, "update": self._update(size.steps),
            "data": self._rows("train", examples=examples),
            "limits": JOB["limits"] if examples else {**JOB["limits"], "rollout_tokens": 768},
        }  # fmt: skip

    def _update(self, steps: int) -> dict[str, Any]:
        return {"lr": self.size.lr, "warmup_steps": min(3, steps), "micro_batch_tokens": 2048}

    async def _train_run(self, name: str, **changes: Any) -> Path:
        """The model after a run, which is resumed if it was stopped."""
        folder = self.folder / name
        settings = self.make_settings(out=folder, **changes)
        with RunFolder(folder, settings.checkpoint.keep) as run:
            resume = run.has_run
        found = Checkpoints(folder).find_latest() if resume else None
        if found is None or found.step < settings.steps:
            with add_cost(folder / COST_FILE):
                await train(settings, folder, self.console, resume=resume)
            found = Checkpoints(folder).find_latest()
        assert found is not None
        return found.folder


def summarize(found: Evaluation) -> dict[str, Any]:
    """Success with its 95 % interval, all and by kind."""

    def of(rate: SuccessRate) -> dict[str, Any]:
        low, high = rate.interval
        return {"succeeded": rate.succeeded, "tried": rate.tried, "value": rate.value, "interval": [low, high]}

    return {**of(found.all), "lost": found.lost, "kinds": {kind: of(rate) for kind, rate in found.kinds.items()}}


COST_FILE = "cost.json"
"""In a run's folder: what it cost in all, however often it was resumed."""


@contextmanager
def add_cost(file: Path) -> Iterator[None]:
    """Adds to a file what is done in the block costs, also if it is stopped."""
    before = json.loads(file.read_text()) if file.exists() else {}
    try:
        with measure_cost() as cost:
            yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        total = {name: round(before.get(name, 0.0) + seconds, 1) for name, seconds in cost.items()}
        write_atomically(file, json.dumps(total).encode())


@contextmanager
def measure_cost() -> Iterator[dict[str, float]]:
    """Seconds of the wall, and of all processors, of what is done in the block."""
    cost: dict[str, float] = {}
    wall, core = time.monotonic(), _core_seconds()
    try:
        yield cost
    finally:
        cost |= {"wall_s": round(time.monotonic() - wall, 1), "core_s": round(_core_seconds() - core, 1)}


def _core_seconds() -> float:
    usages = (getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_run_cost(folder: Path) -> dict[str, float]:
    """Seconds of a run in all, and of its steps by phase."""
    from trainer.storage.run_files import METRICS_FILE, read_metrics

    spent: dict[str, float] = json.loads((folder / COST_FILE).read_text())
    for metrics in read_metrics(folder / METRICS_FILE):
        for name, seconds in metrics.items():
            if name.startswith("time/") and name.endswith("_s") and name.count("/") == 1:
                phase = name.removeprefix("time/").removesuffix("_s")
                spent[phase] = round(spent.get(phase, 0.0) + seconds, 1)
    return spent


def format_table(parts: Mapping[str, Any], size: Size, seed: int) -> Table:
    """What came out, greedy and sampled."""
    table = Table(title=f"seed {seed}: success on {size.held_out} held-out problems, with 95 % intervals")
    table.add_column("")
    for title in ("greedy", "sampled"):
        table.add_column(title, justify="right")
    titles = {
        "before": "the model", "before_with_examples": "with four examples",
        "start": f"after SFT on {parts['successes/sampled']['succeeded']} own successes",
        "after": f"after {size.steps} steps of GRPO",
    }  # fmt: skip
    for name, title in titles.items():
        table.add_row(title, *(_format_rate(parts[f"{name}/{way}"]) for way in ("greedy", "sampled")))
    return table


def _format_rate(result: Mapping[str, Any]) -> str:
    low, high = result["interval"]
    return f"{result['value']:.3f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    """The command line; it ends with a message and a code where a user has to do something."""
    try:
        with report_errors(stopped=lambda: "the same command goes on where it was"):
            _run(_read_arguments())
    except typer.Exit as end:
        sys.exit(end.exit_code)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one or several")
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="the folder")
    parser.add_argument(
        "--model", type=Path, help="another model's folder; by default SmolLM2-135M-Instruct is fetched"
    )
    parser.add_argument("--json", type=Path, help="where the results are written; by default in the folder")
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def _run(args: argparse.Namespace) -> None:
    console = Console(stderr=True)
    size = Size(**{name: getattr(args, name) for name in asdict(Size())})
    model = args.model or fetch_model(partial(console.print, markup=False))
    results = []
    for seed in args.seed:
        job = RealJob(args.out / f"seed-{seed}", model, seed, size, console)
        parts = anyio.run(job.run)
        costs = {name: read_run_cost(job.folder / name) for name in ("sft", "grpo")}
        results.append({"seed": seed, "parts": parts, "seconds": costs})
        Console().print(format_table(parts, size, seed))
        about = describe_run(model, size)
        write_atomically(
            args.json or args.out / "real.json", json.dumps({**about, "seeds": results}, indent=1).encode()
        )


def describe_run(model: Path, size: Size) -> dict[str, Any]:
    """When, where, with what and at which size it was run."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in SYSTEM_PACKAGES},
        "model": PACKAGE if model.name == "smollm2-135m-instruct" else model.name,
        "size": asdict(size),
    }


if __name__ == "__main__":
    main()
