"""Writes the folder of a new job, complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.config import editor_schema
from gateway.errors import ConfigError
from mtrl_plugins.demo.facts import lookup
from mtrl_plugins.starter.commented_settings import format_commented
from trainer.train.run_schema import RUN_SCHEMA
from trainer.train.settings import DEMO

FILES = Path(__file__).with_name("job")
"""Everything but the run file, the tool and the schemas."""
SCHEMAS = ".schemas"
RUN_FILE = "run.yaml"
SHARED_SETTINGS: Mapping[str, Any] = {
    "tools": "./tools",
    "mcp": "./mcp_servers.json",
    "data": "./tasks.jsonl",
    "seed": 0,
    "steps": 30,
    "prompts": 5,
    "n": 8,
    "record": True,
    "reward": {"components": {"right": {"function": "./rewards.py:right", "weight": 1.0, "args": {"second_try": 0.5}}}},
}
"""Settings of both kinds of job."""
LIMITS = {"assistant_turns": 6, "user_turns": 2, "tool_calls": 6}
DEMO_SETTINGS: Mapping[str, Any] = {
    "template": {"sanity": "ignore_strippable"},
    "limits": {**LIMITS, "turn_tokens": 40, "rollout_tokens": 240},
    "algorithm": {"name": "dapo"},
    "update": {"lr": 1e-3, "warmup_steps": 5},
    "evaluation": {"every": 10, "rows": 10, "final_rows": 10},
}
"""For the tiny model, which writes short turns and odd spaces, and learns fast."""
MODEL_SETTINGS: Mapping[str, Any] = {
    "system": "Call the tools for what you do not know. Give the final answer as a number behind `#### `.",
    "limits": {**LIMITS, "turn_tokens": 256, "rollout_tokens": 2048},
    "algorithm": {"name": "dapo"},
    "evaluation": {"every": 10, "rows": 10, "final_rows": 10},
}
"""For a model of one's own; its learning rate follows from its size."""
HEAD = (
    "The run file of this job. `mtrl-train --config {file} --dry-run` checks it, and without `--dry-run` it trains. "
    "A path that begins with ./ or ../ is seen from this file's folder, any other from the folder in which you start "
    "the command. Whatever is left out has its default."
)


def write_job(folder: Path, model: str | None = None) -> Path:
    """Writes a job into a new folder, and returns its run file."""
    _require_free(folder)
    named = None if model in (None, DEMO) else _find_model(model, folder)
    settings = {"model": named or DEMO, **SHARED_SETTINGS, **(MODEL_SETTINGS if named else DEMO_SETTINGS)}
    head = HEAD.format(file=folder / RUN_FILE)
    text = format_commented(settings, head, f"{SCHEMAS}/{RUN_SCHEMA.name}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            job = Path(temporary) / "job"
            _copy_files(job, folder)
            (job / RUN_FILE).write_text(text, encoding="utf-8")
            job.rename(folder)
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
        raise ConfigError(problem, file=folder, remedy="name another folder") from error
    return folder / RUN_FILE


def _find_model(model: str, folder: Path) -> str:
    """A model's folder, as it is written into a run file in the job's folder."""
    path = Path(model).expanduser()
    if not (path / "config.json").is_file():
        remedy = "name a folder as `save_pretrained` writes it, or leave --model out for a tiny model to try with"
        raise ConfigError("is not the folder of a model: there is no config.json", file=path, remedy=remedy)
    if path.is_absolute():
        return str(path)
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else f"./{relative}"


def _require_free(folder: Path) -> None:
    """Raises ConfigError if anything would be overwritten."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        problem = "is not empty" if folder.is_dir() else "is a file"
        raise ConfigError(f"{problem}, and nothing is overwritten", file=folder, remedy="name a new folder")


def _copy_files(job: Path, folder: Path) -> None:
    """Copies the files of the starter; `folder` is where they will be."""
    shutil.copytree(FILES, job, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(Path(lookup.__file__), job / "tools" / "look_up.py")
    (job / SCHEMAS).mkdir()
    for schema in (RUN_SCHEMA, *editor_schema.SCHEMA_FILES):
        shutil.copyfile(schema, job / SCHEMAS / schema.name)
    readme = job / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8").replace("JOB", str(folder)), encoding="utf-8")
