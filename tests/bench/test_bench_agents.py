"""Tests that the benchmark of the endpoint for agents measures every row and loses nothing; no time is checked."""

from __future__ import annotations

from pathlib import Path

from bench.agents import CALL
from bench.agents import SMALL as SIZES
from tests.bench.run_script import measure


def test_turns_sessions_and_streams_are_measured_and_nothing_is_lost(tmp_path: Path) -> None:
    results = measure("agents", "--small", tmp_path)
    turns, sessions, streams = results["turns"], results["sessions"], results["first_byte"]
    assert (turns["turns"], turns["one_ledger"], list(turns["cpu_ms_at"])) == (SIZES.turns, True, ["10"])
    assert turns["tokens"] > SIZES.turns * len(CALL) and turns["cpu_ms"] > 0
    assert (sessions["sessions"], sessions["turns"], sessions["at_once"]) == (SIZES.sessions, 2, SIZES.sessions)
    assert sessions["lost"] == sessions["errors"] == 0 and sessions["cpu_ms_per_turn"] > 0
    assert streams["streams"] == SIZES.streams and 0 < streams["median_ms"] <= streams["p95_ms"]
    report = (tmp_path / "agents.md").read_text()
    assert report.count("| met |") + report.count("| **missed** |") == 5 and "nan" not in report
