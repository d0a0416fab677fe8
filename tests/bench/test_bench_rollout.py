"""Tests that the rollout benchmark runs and measures every engine; times are not checked."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.run_script import run_script


def test_every_engine_is_measured_on_the_same_rollouts_and_every_promise_is_listed(tmp_path: Path) -> None:
    run_script("rollout", "--quick", "--out", tmp_path)
    results = json.loads((tmp_path / "rollout.json").read_text())
    assert list(results["per_s"]) == ["0", "10"]
    for rates in results["per_s"].values():
        assert len(rates) == 4 and all(rate > 0 for rate in rates.values())
    assert 0 < results["cached_of_possible"] <= 1
    assert list(results["in_flight_per_s"]) == ["0", "10"] and list(results["overhead_ms"]) == ["4", "50", "200"]
    text = (tmp_path / "rollout.md").read_text()
    assert text.count("| met |") + text.count("| **missed** |") == 9
