"""Runs scripts of `bench/`: in this process, where one of its own would import torch for seconds, or as users do."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def run_script(name: str, *words: object) -> None:
    """Runs `python bench/NAME.py WORDS`; its modules, which it imports by short names, are forgotten afterwards."""
    file, before = BENCH / f"{name}.py", {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(file), *map(str, words)])
        patch.setattr(sys, "path", [str(BENCH), *sys.path])
        try:
            runpy.run_path(str(file), run_name="__main__")
        finally:
            for module in {*sys.modules} - before:
                origin = getattr(getattr(sys.modules[module], "__spec__", None), "origin", None)
                if origin and Path(origin).parent == BENCH:
                    del sys.modules[module]


def measure(name: str, size: str, out: Path) -> Any:
    """The results of `python bench/NAME.py`, in a process of its own."""
    command = [sys.executable, str(BENCH / f"{name}.py"), size, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads((out / f"{name}.json").read_text())
