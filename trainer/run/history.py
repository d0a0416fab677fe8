"""What a run measured is a line of JSON a step; a line cut off in mid-word, because its writer was killed, is none.

    {"step": 12, "reward/mean": 0.71, "entropy": 0.32, "time/rolling_out_s": 1.9, ...}

Names are area/name. What was measured before the first step stands under step 0. JSON has no infinity and knows what
is no number as null alone: written as null, read as NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import isfinite, nan
from pathlib import Path

from trainer.run.file import RunError

NAME = "metrics.jsonl"
Measured = dict[str, float]
"""The numbers of one step, its own number among them as `step`."""


def dump(step: int, metrics: Mapping[str, float]) -> bytes:
    """The line, its end included."""
    told = {name: value if isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": step, **told}).encode() + b"\n"


def history(file: Path) -> list[Measured]:
    """All that was measured, oldest first."""
    try:
        return [measured for measured, _ in lines(file)]
    except OSError as error:
        raise RunError(
            f"{file}: cannot be read ({error.strerror})\n"
            "  remedy: name the folder of a training run, which holds this file once its first step is over"
        ) from error


def lines(file: Path) -> Iterator[tuple[Measured, int]]:
    """Each whole line, and where it ends."""
    end = 0
    with file.open("rb") as opened:
        for place, line in enumerate(opened, start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield _read(line, file, place), end


def _read(line: bytes, file: Path, place: int) -> Measured:
    try:
        told = json.loads(line)
        return {"step": int(told["step"])} | {
            name: nan if value is None else float(value) for name, value in told.items() if name != "step"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(
            f"{file}: line {place} is damaged ({type(error).__name__}: {error})\n"
            "  remedy: take the line out; what the other lines say stays true"
        ) from error
