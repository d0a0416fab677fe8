"""The file that a rollout worker touches while it can play, by which the process that started it finds that it hangs.

Imported by Ray's workers, so it needs the standard library alone.
"""

from __future__ import annotations

import os
from pathlib import Path

BEAT_VARIABLE = "MTRL_BEAT_FILE"
"""Names the file, if the launcher looks at it."""
START_S = 3600.0
"""How long there may be no file: longer than a worker waits for rank 0."""


def take_beat_file() -> Path | None:
    """The file, whose name is removed from the environment: what this process starts does not beat."""
    file = os.environ.pop(BEAT_VARIABLE, "")
    return Path(file) if file else None


def read_beat(file: Path) -> int | None:
    """When the worker touched the file; None while it cannot play, since it starts or waits for rank 0."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None
