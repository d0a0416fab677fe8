"""The file that a rollout worker touches while it can play, by which the process that started it finds that it hangs.

Imported by Ray's workers, so it needs the standard library alone.
"""

from __future__ import annotations

import os
from pathlib import Path

BEAT_VARIABLE = "MTRL_BEAT_FILE"
"""Names the file, if the launcher looks at it. Before the worker makes it, silence says nothing."""


def take_beat_file() -> Path | None:
    """The file, whose name is removed from the environment: what this process starts does not beat."""
    file = os.environ.pop(BEAT_VARIABLE, "")
    return Path(file) if file else None
