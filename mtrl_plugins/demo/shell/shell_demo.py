"""The demo of shell tasks: a tiny model for them, their Harbor directories, and the root in which they are played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from mtrl_plugins.demo.demos import HELD_OUT_SEED, Demo
from mtrl_plugins.demo.facts import facts_demo
from mtrl_plugins.demo.model_cache import cache_folder, move_into_place
from mtrl_plugins.demo.problem import Split
from mtrl_plugins.demo.shell import shell_tasks
from mtrl_plugins.demo.shell.machine_root import ROOT, make_machine_root
from mtrl_plugins.demo.shell.shell_tasks import FOLDERS, KINDS, NAMES, NOUNS, TOOLS, draw_draft, draw_problems
from mtrl_plugins.demo.warm_start import DemonstrationWriter, Recipe, WarmStartSetup
from trainer.storage.temporary_folder import TemporaryFolder
from trainer.template import Template

TASKS_OF_KIND = {"train": 16, "held_out": 5}
TASK_NAME = "{number:02}-{kind}"
"""Tasks are sorted by name: so their kinds alternate, and the first twenty are one of each."""
TRAINING_CONVERSATIONS = 400
WORD_PATTERN = rf"(?:system|user|assistant|tool)\n|\d|\b(?:{'|'.join((*NOUNS, *NAMES, *FOLDERS))})\b"
"""Pieces that are tokenized alone: words that are copied."""
TASK_FILE = f"""schema_version = "1.4"
artifacts = ["/app"]

[environment]
docker_image = "{ROOT}"
workdir = "/app"

[agent]
timeout_sec = 60

[verifier]
environment_mode = "separate"
timeout_sec = 60
"""
TEST = """#!/bin/sh
# The working folder is as it should be.
if diff -r /tests/expected /app >&2; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@dataclass(frozen=True)
class ShellDemo(Demo):
    """A demo whose tasks are directories of Harbor tasks."""

    def find_task_folders(self) -> Mapping[str, Path]:
        """The folders of both splits, which are written if they do not exist yet, as the root is made."""
        make_machine_root()
        source = f"{TASK_FILE}{TEST}{TASKS_OF_KIND}{TASK_NAME}{Path(shell_tasks.__file__).read_text(encoding='utf-8')}"
        folder = cache_folder() / f"shell-tasks-{sha256(source.encode()).hexdigest()[:16]}"
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFolder(folder.parent) as temporary:
                written = temporary.path / "tasks"
                write_tasks(written / "train", "train", 0)
                write_tasks(written / "held_out", "held_out", HELD_OUT_SEED)
                move_into_place(written, folder)
        return {"train": folder / "train", "eval": folder / "held_out"}


def write_tasks(folder: Path, split: Split, seed: int) -> None:
    """Writes the directories of a split's tasks."""
    for kind in KINDS:
        for number in range(TASKS_OF_KIND[split]):
            draft, task = draw_draft(seed, number, kind, split), TASK_NAME.format(number=number, kind=kind)
            solution = "".join(f"{command}\n" for command, _ in draft.commands)
            files = {
                "task.toml": TASK_FILE, "instruction.md": draft.request, "tests/test.sh": TEST,
                "solution/solve.sh": f"#!/bin/sh\n{solution}",
                **{f"environment/{name}": text for name, text in draft.files.items()},
                **{f"tests/expected/{name}": text for name, text in draft.expected.items()},
            }  # fmt: skip
            for name, text in files.items():
                file = folder / task / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")


def build_model(folder: Path, seed: int = 0) -> Path:
    """Writes the model with random weights, as `save_pretrained` does."""
    tokenizer = facts_demo.train_tokenizer(
        facts_demo.SPECIAL_TOKENS, facts_demo.CHAT_TEMPLATE, _training_texts, WORD_PATTERN
    )
    return facts_demo.save_model(folder, tokenizer, seed)


def _training_texts(tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    return facts_demo.render_problems(tokenizer, islice(draw_problems("tokenizer"), TRAINING_CONVERSATIONS), TOOLS)


def build_warm_start(folder: Path) -> WarmStartSetup:
    """Sets up the warm start of the model in a folder."""
    writer = DemonstrationWriter(Template.load(folder), TOOLS)
    return WarmStartSetup(writer, draw_problems)


DEMO = ShellDemo(
    tuple(KINDS),
    shell_tasks.draw_problem,
    {"habit": Recipe(demo="shell", kinds=tuple(KINDS))},
    build_model,
    build_warm_start,
)
