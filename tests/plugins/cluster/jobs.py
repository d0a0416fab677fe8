"""A job to render for clusters, ordinary and hostile, and stand-ins for the programs that a cluster has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HOSTILE = (
    "a'b", '"quoted"', "$(touch HACKED)", "`touch HACKED`", "$HOME", "$$", "$$(HOME)", "; touch HACKED #", "1e3", "y",
    "two\nlines",
)  # fmt: skip
"""Values that end up in scripts and manifests, and must arrive as they are."""


def write_job(folder: Path, **settings: Any) -> Path:
    """A run file with SGLang servers of two GPUs, and a model's folder."""
    (folder / "models" / "m").mkdir(parents=True, exist_ok=True)
    (folder / "models" / "m" / "config.json").write_text("{}")
    values = {
        "model": "models/m",
        "data": "tasks.jsonl",
        "engine": "sglang",
        "serving": {"options": ["--tp", "2"]},
        **settings,
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps(values))  # YAML, too, and unambiguous
    return file


def write_program(folder: Path, name: str, code: str) -> Path:
    """A program in Python."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!{sys.executable}\n{code}")
    file.chmod(0o755)
    return file


def read_lines(file: Path) -> list[Any]:
    """What a stand-in wrote, a JSON value a line."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
