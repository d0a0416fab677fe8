"""The file that says how a run was made: its settings, its model, its versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABOUT = "run.json"


def run_of(folder: Path) -> Path:
    """The folder that says how it was made: its own, or the one of the run whose evaluation it is."""
    return next((one for one in (folder, *folder.absolute().parents[:2]) if (one / ABOUT).exists()), folder)


def about(folder: Path) -> Mapping[str, Any]:
    """How it was made; empty as long as it has not begun."""
    try:
        read = json.loads((run_of(folder) / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
