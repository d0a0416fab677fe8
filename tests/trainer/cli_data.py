"""Data files and settings for tests of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

ROOT = Path(__file__).parents[2]
TOOLS = str(ROOT / "tool_configs")
SMALL_SETTINGS = {"limits": {"turn_tokens": 24, "rollout_tokens": 3000}, "concurrency": {"running_requests": 8}}
RunCommand = Callable[..., Result]


def write_rows(file: str, *rows: Any) -> str:
    Path(file).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return file


FEEDBACK_ROW = {"prompt": "What is 3 + 4?", "ground_truth": "7", "interaction_kwargs": {"name": "gsm8k"}}
PLAIN_ROW = {"prompt": "Note the word gnu."}
