"""The bench of trainers still measures what it says. No time is ever judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
WORK = ("rollouts", "written", "tokens", "turns")


def test_a_step_is_measured_and_a_peer_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "trainer.py"), "--quick", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    told = json.loads((tmp_path / "trainer.json").read_text())
    ours = told["figures"]["mtrl"]
    assert ours["rollouts"] == told["size"]["prompts"] * told["size"]["siblings"] and ours["core_s"] > 0
    text = (tmp_path / "trainer.md").read_text()
    if told["problem"]:
        assert f"TRL was not measured: {told['problem']}." in text
        return
    assert text.count("| met |") + text.count("| **missed** |") == 2
    for name in ("trl", "trl_as_it_comes"):
        theirs = told["figures"][name]
        assert all(theirs[what] > 0 for what in WORK) and theirs["rollouts"] == ours["rollouts"]
