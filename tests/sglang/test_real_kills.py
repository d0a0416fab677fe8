"""A run whose server is killed at random moments loses nothing; `make kills` does it twenty times."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SMALL = {"prompts": 8, "n": 8}
KILLS, STEPS = 3, 24
MAX_FAULT_DELAY_S = 3.0
"""So soon that the last comes long before the run is over, however quick the machine."""


def test_run_with_a_killed_server_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import kills

    monkeypatch.setattr(kills, "MAX_FAULT_DELAY_S", MAX_FAULT_DELAY_S)
    found = kills.run_with_faults(tmp_path, KILLS, random.Random(0), STEPS, SMALL)
    sys.stderr.write(f"{found}\n")
    assert sum(found.faults.values()) == KILLS and found.steps == STEPS
    assert (found.missing, found.doubled, found.stale) == (0, 0, 0)
    assert found.rollouts == STEPS * 64 and found.carried_out == found.called > 0
    assert found.is_intact
