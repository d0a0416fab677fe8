"""The bench of rollouts still measures what it says. No time is ever judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_every_engine_is_measured_on_the_same_rollouts_and_every_promise_has_its_line(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "rollout.py"), "--quick", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "rollout.json").read_text())
    assert list(told["per_s"]) == ["0", "10"]
    for paces in told["per_s"].values():
        assert len(paces) == 4 and all(pace > 0 for pace in paces.values())
    assert 0 < told["cached_of_possible"] <= 1
    assert list(told["in_flight_per_s"]) == ["0", "10"] and list(told["overhead_ms"]) == ["4", "50", "200"]
    text = (tmp_path / "rollout.md").read_text()
    assert text.count("| met |") + text.count("| **missed** |") == 9
