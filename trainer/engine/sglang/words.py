"""What a server printed last, and of what it ended: its processes do so one after the other, each with pages of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

TRACE_BYTES = 65536
LINES = 20
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", re.M)
_NOISE = re.compile(r"^(?:nanobind: | - leaked | - \.\.\. skipped ).*\n?", re.M)
"""A library counts in each process that ends what it has not freed, which is always as much."""


def heard(log: Path, since: int) -> str:
    """Its last bytes; `since` is where it was started."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since, end - TRACE_BYTES))
            return file.read().decode("utf-8", "replace").strip()
    except OSError as error:
        return f"(cannot be read: {error})"


def last(words: str) -> str:
    """Lines for a person: the last ones, after the last error where that is further up."""
    lines = _NOISE.sub("", words).splitlines()[-LINES:]
    errors = [error for error in _ERROR.findall(words) if "CancelledError" not in error]  # Others end over it.
    if errors and errors[-1] not in lines:
        lines = [errors[-1], "...", *lines[-LINES // 2 :]]
    return "\n".join(lines) or "(nothing)"
