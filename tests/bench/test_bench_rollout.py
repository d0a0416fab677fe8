"""Tests that the rollout benchmark runs and measures every engine; times are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_every_engine_is_measured_on_the_same_rollouts_and_every_promise_is_listed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "rollout.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "rollout.json").read_text())
    assert list(results["per_s"]) == ["0", "10"]
    for rates in results["per_s"].values():
        assert len(rates) == 4 and all(rate > 0 for rate in rates.values())
    assert 0 < results["cached_of_possible"] <= 1
    assert list(results["in_flight_per_s"]) == ["0", "10"] and list(results["overhead_ms"]) == ["4", "50", "200"]
    text = (tmp_path / "rollout.md").read_text()
    assert text.count("| met |") + text.count("| **missed** |") == 9
