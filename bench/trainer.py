"""Measures a step of GRPO beside TRL's GRPOTrainer: the same model, tools, prompts, group size and lengths, in one run.

python bench/trainer.py             # ten minutes; writes bench/results/trainer.{json,md}
python bench/trainer.py --quick     # whether everything still runs, with a model that knows nothing; nothing installed
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
import yaml  # noqa: E402
from peers import Peer, trl  # noqa: E402
from watched import Step, steps  # noqa: E402

from trainer.config import Admission, RolloutLimits  # noqa: E402
from trainer.data.curriculum import Course  # noqa: E402
from trainer.demo.facts.model import build  # noqa: E402
from trainer.demo.facts.task import TOOLS  # noqa: E402
from trainer.demo.folder import cache, made  # noqa: E402
from trainer.demo.warm import Recipe  # noqa: E402
from trainer.template import Template  # noqa: E402
from trainer.train.job import tasks_of  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402

RESULTS = ROOT / "bench" / "results"
KINDS = ("fact", "sum", "hop", "move")
"""One, one, two and three calls. Without those that a judge answers, since TRL has nobody who answers but tools."""
HALF_WAY = Recipe(right=0.75)
"""A policy which makes most of its calls and guesses now and then: as half-way through a run, groups teach."""
STILL = 1e-6
"""A learning rate that leaves the policy as it is, so that each step of each trainer is the same work."""
PROMISED = 3.0
OURS, SERVED = "mtrl", "mtrl_mcp"
"""With the very tools that TRL has, a class and a function; and with the calculator on its MCP server."""
TUNED, PLAIN = "trl", "trl_as_it_comes"
"""As quick as we can make it by its own settings, in the precision of ours; and with its defaults."""
PATIENCE_S = 400.0
SHOWN = ("mtrl", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Size:
    rounds: int = 3
    steps: int = 15
    warm: int = 5
    """Steps that come before those that count."""
    prompts: int = 16
    siblings: int = 8


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a trainer: medians over its runs, each of them told by the mean of its steps; and for what it did, means."""

    core_s: float
    core_s_least: float
    core_s_most: float
    wall_s: float
    written_per_s: float
    """Tokens of the policy's own a second of rolling out."""
    learned_per_s: float
    """Tokens of whole rollouts, prompts included, a second of all else in the step."""
    rollouts: float
    written: float
    tokens: float
    turns: float
    calls: float
    reward: float


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="one small round")
    options.add_argument("--out", type=Path, metavar="DIR", help="where the results go; of a full run, bench/results")
    asked = options.parse_args()
    size = Size(1, 3, 1, 2, 4) if asked.quick else Size()
    torch.set_num_threads(1)
    peer = trl(now=not asked.quick)
    with tempfile.TemporaryDirectory() as folder:
        model = build(Path(folder) / "model") if asked.quick else made(HALF_WAY, cache())
        load_before = os.getloadavg()[0]
        found = measured(size, settings(size, model), peer, Path(folder))
    about = _about(size, peer, load_before)
    text = told(found, peer, about)
    print(text)
    out = asked.out or (None if asked.quick else RESULTS)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "trainer.md").write_text("# A step of GRPO beside TRL\n\n" + text)
        figures = {name: asdict(one) for name, one in found.items()}
        whole = {"about": about, "size": asdict(size), "problem": peer.problem, "figures": figures}
        (out / "trainer.json").write_text(json.dumps(whole, indent=1) + "\n")


def settings(size: Size, model: Path) -> TrainSettings:
    """As the default job has it, but for what would be other work than a step, and for a policy that stays."""
    return TrainSettings.model_validate(
        {
            "model": str(model),
            "kinds": KINDS,
            "steps": size.steps,
            "prompts": size.prompts,
            "n": size.siblings,
            "reward": {"components": {"outcome": {"function": "outcome"}}},
            "limits": RolloutLimits(assistant_turns=6, tool_calls=6, turn_tokens=40, rollout_tokens=200).model_dump(),
            "admission": Admission(open=256, writing=128).model_dump(),
            "algorithm": {"name": "dapo"},
            "update": {"lr": STILL},
            "evaluation": {"every": 0},
            "checkpoint": {"every": size.steps},
        }
    )


def measured(size: Size, job: TrainSettings, peer: Peer, folder: Path) -> dict[str, Figures]:
    """They take turns, so that a busy moment of the machine falls on all of them."""
    for name, tools in ((OURS, _functions(folder / "tools")), (SERVED, ROOT / "tool_configs")):
        values = job.model_dump(mode="json", exclude_none=True) | {"tools": str(tools)}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    asked = _for_trl(size, job)
    for name in (TUNED, PLAIN):
        (folder / f"{name}.json").write_text(json.dumps({**asked, "tuned": name == TUNED}))
    found: dict[str, list[list[Step]]] = {}
    for number in range(size.rounds):
        for name in (OURS, SERVED) if peer.problem else (OURS, SERVED, TUNED, PLAIN):
            taken = _theirs(name, peer, folder, number) if name in (TUNED, PLAIN) else _ours(name, folder, number)
            found.setdefault(name, []).append(taken[size.warm - 1 :])
            print(f"round {number + 1} of {size.rounds}: {name}", file=sys.stderr)
    read = {OURS: _of_mtrl, SERVED: _of_mtrl, TUNED: _of_trl, PLAIN: _of_trl}
    return {name: _figures(runs, read[name]) for name, runs in found.items()}


def _functions(folder: Path) -> Path:
    """The lookup as it is shipped, and the calculator's function without its server."""
    folder.mkdir()
    shutil.copy(ROOT / "tool_configs" / "servers" / "calculator.py", folder)
    offered = yaml.safe_load((ROOT / "tool_configs" / "lookup.yaml").read_text())
    offered["tools"].append({"function": "calculator:calculate"})  # After it: the model knows them in this order.
    (folder / "tools.yaml").write_text(yaml.safe_dump(offered))
    return folder


def _ours(name: str, folder: Path, number: int) -> list[Step]:
    out = folder / f"{name}-{number}"
    command = [sys.executable, "-m", "trainer.cli", "--config", str(folder / f"{name}.yaml"), "--out", str(out)]
    return steps("mtrl", command, _env(), out / "metrics.jsonl", PATIENCE_S)


def _theirs(name: str, peer: Peer, folder: Path, number: int) -> list[Step]:
    lines = folder / f"{name}-{number}.jsonl"
    command = [peer.python, str(ROOT / "bench" / "trl_grpo.py"), str(folder / f"{name}.json"), str(lines)]
    return steps(peer.title, command, _env(), lines, PATIENCE_S)


def _for_trl(size: Size, job: TrainSettings) -> Mapping[str, Any]:
    tasks = list(islice(Course(job.curriculum, tasks_of(job).train, seed=job.seed), size.steps * size.prompts))
    template = Template.load(job.model)
    longest = max(len(template.open(task.messages, TOOLS)) for task in tasks)
    rows = [
        {"prompt": list(task.messages), "facts": json.dumps(task.columns["facts"]), "truth": str(task.truth)}
        for task in tasks
    ]
    return {
        "model": job.model,
        "rows": rows,
        "steps": size.steps,
        "prompts": size.prompts,
        "n": size.siblings,
        "turns": job.limits.assistant_turns,
        "turn_tokens": job.limits.turn_tokens,
        "completion_tokens": job.limits.rollout_tokens - longest,
        "lr": job.update.lr,
        "betas": job.update.betas,
        "seed": job.seed,
    }


def _env() -> Mapping[str, str]:
    """One thread each, and nothing is looked for on a hub."""
    alone = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    return os.environ | alone


DONE = ("rollouts", "written", "tokens", "turns", "calls", "reward")


@dataclass(frozen=True, slots=True)
class _Work:
    """What one step did, in the words of neither trainer."""

    rolling_out_s: float
    rollouts: float
    written: float
    tokens: float
    turns: float
    calls: float
    reward: float


def _of_mtrl(line: Mapping[str, Any]) -> _Work:
    count = line["rollout/count"]
    sums = [count * line[f"rollout/{name}"] for name in ("written", "tokens", "turns", "calls")]
    return _Work(line["time/rolling_out_s"], count, *sums, line["reward/mean"])


def _of_trl(line: Mapping[str, Any]) -> _Work:
    return _Work(**line)


def _figures(runs: Sequence[Sequence[Step]], read: Callable[[Mapping[str, Any]], _Work]) -> Figures:
    each = [(run, [read(one.told) for one in run]) for run in runs]
    core_s = [mean(one.core_s for one in run) for run, _ in each]
    rest_s = [sum(one.wall_s for one in run) - sum(did.rolling_out_s for did in work) for run, work in each]
    done = [did for _, work in each for did in work]
    return Figures(
        core_s=median(core_s),
        core_s_least=min(core_s),
        core_s_most=max(core_s),
        wall_s=median(mean(one.wall_s for one in run) for run, _ in each),
        written_per_s=median(
            sum(did.written for did in work) / sum(did.rolling_out_s for did in work) for _, work in each
        ),
        learned_per_s=median(
            sum(did.tokens for did in work) / rest for (_, work), rest in zip(each, rest_s, strict=True)
        ),
        **{name: mean(getattr(did, name) for did in done) for name in DONE},
    )


ROWS = (
    ("core-seconds of a step", "core_s", ".2f"),
    ("tokens written a second of rolling out", "written_per_s", ",.0f"),
    ("tokens learned from a second of the rest", "learned_per_s", ",.0f"),
    ("rollouts in a step", "rollouts", ",.0f"),
    ("turns in a step", "turns", ",.0f"),
    ("tool calls in a step", "calls", ",.0f"),
    ("tokens written in a step", "written", ",.0f"),
    ("tokens in all in a step", "tokens", ",.0f"),
    ("mean reward", "reward", ".2f"),
)
"""What is read as a title, a figure's name, and its form."""


def told(found: Mapping[str, Figures], peer: Peer, about: Mapping[str, str]) -> str:
    heads = {
        OURS: "mtrl",
        SERVED: "mtrl, calculator behind MCP",
        TUNED: f"{peer.title}, tuned",
        PLAIN: f"{peer.title}, as it comes",
    }
    lines = [f"{name}: {value}  " for name, value in about.items()]
    lines += ["", f"| | {' | '.join(heads[name] for name in found)} |", "|---|" + "--:|" * len(found)]
    for title, name, form in ROWS:
        lines.append(f"| {title} | {' | '.join(format(getattr(one, name), form) for one in found.values())} |")
    lines += ["", *(promises(found, heads) if TUNED in found else [f"TRL was not measured: {peer.problem}."])]
    return "\n".join(lines) + "\n"


def promises(found: Mapping[str, Figures], heads: Mapping[str, str]) -> list[str]:
    lines = ["| promise | measured | |", "|---|--:|---|"]
    for name in (TUNED, PLAIN):
        times = found[name].core_s / found[OURS].core_s
        kept = "met" if times >= PROMISED else "**missed**"
        lines.append(f"| a step at least {PROMISED:g}x as cheap as that of {heads[name]} | {times:.1f}x | {kept} |")
    return lines


def _about(size: Size, peer: Peer, load_before: float) -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread; load {load_before:.1f} before the run",
        "versions": f"Python {platform.python_version()}, {', '.join(f'{name} {version(name)}' for name in SHOWN)}; "
        f"{peer.title}",
        "step": f"{size.prompts} prompts of {', '.join(KINDS)}, {size.siblings} rollouts each; medians over "
        f"{size.rounds} runs of each trainer in turns, {size.steps - size.warm} steps of each after {size.warm}",
        "tuned": "full precision, nothing computed twice, four passes; TRL as it comes has bfloat16, layers computed "
        "twice and passes of eight rollouts",
    }


if __name__ == "__main__":
    main()
