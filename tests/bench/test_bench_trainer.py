"""Tests that the trainer benchmark runs and measures every trainer; times are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
POSITIVE_FIGURES = ("rollouts", "written", "tokens", "turns")


def test_a_step_is_measured_and_a_peer_that_is_not_installed_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "trainer.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "trainer.json").read_text())
    ours = results["figures"]["mtrl"]
    assert ours["rollouts"] == results["size"]["prompts"] * results["size"]["siblings"] and ours["core_s"] > 0
    text = (tmp_path / "trainer.md").read_text()
    if results["problem"]:
        assert f"TRL was not measured: {results['problem']}." in text
        return
    assert text.count("| met |") + text.count("| **missed** |") == 2
    for trainer in ("trl", "trl_as_it_comes"):
        theirs = results["figures"][trainer]
        assert all(theirs[name] > 0 for name in POSITIVE_FIGURES) and theirs["rollouts"] == ours["rollouts"]
