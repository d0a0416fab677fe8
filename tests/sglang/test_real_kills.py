"""A run whose server is killed at random moments loses nothing; `make kills` kills twenty, to the end of the job."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SMALL = {"prompts": 8, "n": 8}
KILLS, STEPS = 3, 24
STRIKE_S = 3.0
"""So soon that the last comes long before the run is over, however quick the machine."""


def test_a_run_whose_server_is_killed_loses_nothing_and_does_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import kills

    monkeypatch.setattr(kills, "STRIKE_S", STRIKE_S)
    found = kills.disturbed(tmp_path, KILLS, random.Random(0), STEPS, SMALL)
    sys.stderr.write(f"{found}\n")
    assert sum(found.faults.values()) == KILLS and found.steps == STEPS
    assert (found.missing, found.doubled, found.stale) == (0, 0, 0)
    assert found.rollouts == STEPS * 64 and found.carried_out == found.called > 0
    assert found.kept
