"""Runs a script of `bench/` in this process: a process of its own would import torch and its peers for seconds."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

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
