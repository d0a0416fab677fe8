"""Runs a program whose wall clock jumps back and forward by an hour at every look at it.

python clock_jumps.py -m MODULE ARGS...
"""

from __future__ import annotations

import itertools
import runpy
import sys
import time
from typing import Any

HOUR_S = 3600.0
JUMPS = itertools.cycle((0.0, -HOUR_S, HOUR_S))


def jump() -> None:
    """Replaces the functions of `time` that read the wall clock."""
    real: dict[str, Any] = {name: getattr(time, name) for name in ("time", "time_ns")}
    time.time = lambda: real["time"]() + next(JUMPS)
    time.time_ns = lambda: real["time_ns"]() + int(next(JUMPS) * 1e9)


if __name__ == "__main__":
    jump()
    module = sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
