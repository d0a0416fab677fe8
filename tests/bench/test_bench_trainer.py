"""Tests that the trainer benchmark runs and measures every trainer; times are not checked."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.run_script import run_script

POSITIVE_FIGURES = ("rollouts", "written", "tokens", "turns")


def test_a_step_is_measured_and_a_peer_that_is_not_installed_is_reported(tmp_path: Path) -> None:
    run_script("trainer", "--quick", "--out", tmp_path)
    results = json.loads((tmp_path / "trainer.json").read_text())
    ours = results["figures"]["mtrl"]
    assert ours["rollouts"] == results["size"]["prompts"] * results["size"]["siblings"] and ours["core_s"] > 0
    text = (tmp_path / "trainer.md").read_text()
    counted = next(line for line in text.splitlines() if line.startswith("| eager operations |"))
    assert all(int(cell.replace(",", "")) > 0 for cell in counted.split("|")[2:-1])
    if results["problem"]:
        assert f"TRL was not measured: {results['problem']}." in text
        return
    assert text.count("| met |") + text.count("| **missed** |") == 2
    for trainer in ("trl", "trl_as_it_comes"):
        theirs = results["figures"][trainer]
        assert all(theirs[name] > 0 for name in POSITIVE_FIGURES) and theirs["rollouts"] == ours["rollouts"]
