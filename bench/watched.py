"""A trainer under measurement: it writes a line for each step, and what its processes took is noted when one comes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil

LOOK_S = 0.01
"""Between two looks; also how far off a step's time may be, either way."""
END_S = 20.0


@dataclass(frozen=True, slots=True)
class Step:
    wall_s: float
    core_s: float
    """Of all its processes, those that it started included."""
    told: Mapping[str, Any]
    """What it said of the step itself."""


def steps(name: str, command: Sequence[str], env: Mapping[str, str], lines: Path, patience_s: float) -> list[Step]:
    """Each step but the first, from the line before to its own. One that ends without the time's end went wrong."""
    with TemporaryFile("w+") as words:
        process = psutil.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=words, stderr=subprocess.STDOUT)
        try:
            seen = _seen(process, lines, time.monotonic() + patience_s)
        finally:
            _end(process)
        if process.returncode != 0 or len(seen) < 2:
            words.seek(0)
            said = words.read().strip().splitlines()[-3:]
            raise RuntimeError(f"{name} ended with {process.returncode} after {len(seen)} steps: {' | '.join(said)}")
    return [Step(now[0] - then[0], now[1] - then[1], now[2]) for then, now in pairwise(seen)]


def _seen(process: psutil.Popen, lines: Path, until: float) -> list[tuple[float, float, Mapping[str, Any]]]:
    """Time and CPU at each line. Whoever leaves, leaves what it took with the process that waited for it."""
    seen: list[tuple[float, float, Mapping[str, Any]]] = []
    while time.monotonic() < until:
        ended = process.poll() is not None
        whole = lines.read_bytes().split(b"\n")[:-1] if lines.exists() else []
        if len(whole) > len(seen) and not ended:
            now = time.perf_counter(), _core_s(process)
            seen += [(*now, json.loads(line)) for line in whole[len(seen) :]]
        if ended:
            break
        time.sleep(LOOK_S)
    return seen


def _core_s(process: psutil.Popen) -> float:
    own = process.cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return float(total)


def _end(process: psutil.Popen) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(psutil.TimeoutExpired):
            process.wait(END_S)
    if process.poll() is None:
        process.kill()
        process.wait()
