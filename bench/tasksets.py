"""Tasksets of verifiers, unchanged, learned by SmolLM2: it is shown answers to some tasks, then their job is run.

git clone https://github.com/PrimeIntellect-ai/verifiers
.environments/verifiers/bin/pip install verifiers/environments/alphabet_sort verifiers/environments/reverse_text
python bench/tasksets.py                                      # writes bench/results/TASKSET.json; an hour of a core
python bench/tasksets.py --taskset alphabet-sort --steps 1    # a small part of it; writes nothing without --out

Their data are on the hub. In their place are names and phrases that are drawn here, of words of Python's manual.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from bars import describe_environment, run_command, train_seeds  # noqa: E402
from fetch_model import fetch_model  # noqa: E402

from mtrl_plugins.demo.facts.facts_tasks import CITIES, PEOPLE  # noqa: E402
from mtrl_plugins.verifiers.plugin import PLUGIN  # noqa: E402
from trainer.cli.run_file import load_settings  # noqa: E402
from trainer.storage.run_files import METRICS_FILE, read_metrics  # noqa: E402
from trainer.train.job import load_tasks  # noqa: E402
from trainer.train.settings import TrainSettings  # noqa: E402

RESULTS = ROOT / "bench" / "results"
PYTHON = ROOT / ".environments" / "verifiers" / "bin" / "python"
ROWS = 3000
THREADS = len(os.sched_getaffinity(0))
LR = 5e-6
Row = Mapping[str, Any]
Chat = list[dict[str, Any]]


def draw_names(draw: Random) -> Iterator[Row]:
    """Lists of names, as of the authors of a paper."""
    while True:
        yield {"names": [f"{draw.choice(PEOPLE)} {draw.choice(CITIES)}" for _ in range(18)]}


def draw_phrases(draw: Random) -> Iterator[Row]:
    """Three to six of the commonest words of Python's manual, but for the shortest, in any order."""
    found = Counter(re.findall(r"[a-z]{3,}", " ".join(topics.values()).lower()))
    words = [word for word, _ in found.most_common(60)]
    while True:
        yield {"prompt": " ".join(draw.choices(words, k=draw.randint(3, 6)))}


def sort_names(columns: Row) -> list[str]:
    """The right answer to each turn of alphabet-sort."""
    tags = ["alphabetical_sorted", *["combined_alphabetical_sorted"] * 2]
    lists = columns["info"]["info"]["ground_truths"]
    return [f"<{tag}>\n" + "\n".join(names) + f"\n</{tag}>" for tag, names in zip(tags, lists, strict=False)]


def reverse_text(columns: Row) -> list[str]:
    """The right answer of reverse-text."""
    return [f"<reversed_text>{columns['answer']}</reversed_text>"]


@dataclass(frozen=True, slots=True)
class Taskset:
    """A taskset; its job has the same name."""

    data: str
    """Where it looks for its data, which may be a folder."""
    draw: Callable[[Random], Iterator[Row]]
    answer: Callable[[Row], list[str]]
    shown: int
    """Tasks whose answers the model is shown."""
    shown_lr: float
    """The learning rate meanwhile."""
    changes: tuple[str, ...]
    """Of its job, for a model and a machine of this size."""


TASKSETS = {
    "alphabet-sort": Taskset(
        "kalomaze/alphabetic-arxiv-authors-it1", draw_names, sort_names, 128, 1e-4,
        ("environment.args={min_turns: 3, max_turns: 3, max_names_per_turn: 2}", "steps=10",
         "prompts=8", "update.lr=2e-5", "limits={turn_tokens: 96, rollout_tokens: 768}"),
    ),
    "reverse-text": Taskset(
        "PrimeIntellect/Reverse-Text-RL", draw_phrases, reverse_text, 1280, 4e-4, ("limits.turn_tokens=64",)
    ),
}  # fmt: skip


def write_data(folder: Path, taskset: Taskset, seed: str) -> None:
    """Data of the taskset, where it finds them in a folder."""
    file = folder / taskset.data / "train.jsonl"
    file.parent.mkdir(parents=True)
    rows = islice(taskset.draw(Random(seed)), ROWS)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def answer_tasks(taskset: Taskset, settings: TrainSettings) -> Iterator[Chat]:
    """Tasks with their right answers, as chats."""
    for task in islice(load_tasks(settings).train[None], taskset.shown):
        chat = [dict(message) for message in task.messages if message["role"] == "system"]
        info = task.columns["info"]
        asked = info["info"]["user_turns"] if "info" in info else [info["prompt"]]
        for question, answer in zip(asked, taskset.answer(task.columns), strict=True):
            chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield chat


def learn_chats(folder: Path, model: Path, chats: Iterable[Chat], lr: float, *changes: str) -> tuple[Path, float]:
    """The model that learned the assistant's turns of chats, and the core-seconds which that took."""
    traces, run = folder / "traces.jsonl", folder / "start"
    traces.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    settings = [f"update.lr={lr}", "update.warmup_steps=3", "update.lr_scheduler=linear", "checkpoint.every=1000",
                "update.micro_batch_tokens=1024", "template.sanity=ignore_strippable", *changes]  # fmt: skip
    given = ["sft", "--data", str(traces), "--model", str(model), "--out", str(run), "--batch", "16"]
    _, core_s = run_command([*given, *settings], folder, threads=THREADS)
    return max((run / "checkpoints").iterdir()), core_s


def train_seed(name: str, steps: int | None, seed: int, folder: Path) -> dict[str, Any]:
    """The rewards of a run's steps, of which each has tasks of its own, after the model was shown other tasks."""
    taskset = TASKSETS[name]
    assert PLUGIN.jobs is not None
    job, model = PLUGIN.jobs / f"{name}.yaml", fetch_model(print)
    few = [] if steps is None else [f"steps={steps}"]
    changes = [f"environment.python={PYTHON}", f"seed={seed}", f"update.lr={LR}", "update.micro_batch_tokens=1024",
               "checkpoint.every=5", *taskset.changes, *few]  # fmt: skip
    for part in ("sft", "grpo"):
        write_data(folder / part, taskset, f"{seed}/{part}")
    with chdir(folder / "sft"):
        settings = load_settings(TrainSettings, job, {}, overrides=[*changes, f"model={model}"])
        trained, sft = learn_chats(folder, model, answer_tasks(taskset, settings), taskset.shown_lr, *few)
    run = folder / "run"
    given = ["--config", str(job), "--model", str(trained), "--out", str(run), *changes]
    _, grpo = run_command(given, folder, cwd=folder / "grpo", threads=THREADS)
    found = [step for step in read_metrics(run / METRICS_FILE) if "reward/mean" in step]
    return {
        "seed": seed, "sft_core_s": round(sft, 1), "grpo_core_s": round(grpo, 1),
        "reward": [round(step["reward/mean"], 4) for step in found],
        "mismatch_kl": max(step["mismatch/kl"] for step in found),
    }  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--taskset", choices=TASKSETS, nargs="+", default=list(TASKSETS))
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--steps", type=int, help="fewer than the job's own")
    options.add_argument("--out", type=Path, metavar="DIR", help="folder for results; a full run: bench/results")
    args = options.parse_args()
    out = args.out or (RESULTS if args.steps is None else None)
    for name in args.taskset:
        about = describe_environment("shell", THREADS) | {"job": f"`python bench/tasksets.py --taskset {name}`"}
        train_seeds(name, args.seeds, partial(train_seed, name, args.steps), about, out)


if __name__ == "__main__":
    main()
