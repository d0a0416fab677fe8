"""Tests of the soak: each load runs, in small, and growth is told from noise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import soak

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize(
    ("name", "count", "samples"),
    [("native", 2000, 2), ("pooled", 600, 6), ("process", 16, 16), ("boxes", 16, 16), ("training", 6, 6)],
    ids=lambda value: str(value),
)
def test_load_runs_and_samples_its_process(name: str, count: int, samples: int) -> None:
    command = [sys.executable, str(BENCH / "soak.py"), "--load", name, "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["count"] == count and result["outcomes"].get("ok", result["outcomes"].get("ok, graded 1", 0)) > 0
    assert len(result["samples"]) == samples
    assert all(sample["memory"] > 10 and sample["threads"] > 0 for sample in result["samples"])
    table = soak.format_table({name: result})
    assert table.count("| yes |") + table.count("| **no** |") == len(soak.ALLOWED)
