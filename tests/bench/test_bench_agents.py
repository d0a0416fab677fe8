"""Tests that the benchmark of the endpoint for agents measures every row and loses nothing; no time is checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.agents import CALL
from bench.agents import SMALL as SIZES

BENCH = Path(__file__).parents[2] / "bench"


def test_turns_sessions_and_streams_are_measured_and_nothing_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "agents.py"), "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "agents.json").read_text())
    check_turns(results["turns"])
    sessions, streams = results["sessions"], results["first_byte"]
    assert (sessions["sessions"], sessions["turns"], sessions["at_once"]) == (SIZES.sessions, 2, SIZES.sessions)
    assert sessions["lost"] == sessions["errors"] == 0 and sessions["cpu_ms_per_turn"] > 0 and sessions["wall_s"] > 0
    assert streams["streams"] == SIZES.streams
    assert 0 < streams["median_ms"] <= streams["most_ms"] and streams["median_ms"] <= streams["p95_ms"]
    check_report((tmp_path / "agents.md").read_text(), results)


def check_turns(turns: dict[str, Any]) -> None:
    """Each turn is in the one ledger, which holds the prompt and every answer; each row has been measured."""
    assert (turns["turns"], turns["prompt_bytes"], turns["one_ledger"]) == (SIZES.turns, SIZES.prompt_bytes, True)
    least = SIZES.turns * len(CALL)
    assert least < turns["tokens"] < least + SIZES.turns * 1000 + SIZES.prompt_bytes
    assert list(turns["cpu_ms_at"]) == ["10"] and all(value > 0 for value in turns["cpu_ms_at"].values())
    assert turns["cpu_ms"] > 0


def check_report(text: str, results: dict[str, Any]) -> None:
    """Every promise has its figure with its unit, and every measured row is in a table."""
    promises = [line.split("|")[1:4] for line in text.splitlines() if line.endswith(("| met |", "| **missed** |"))]
    figures = [figure.strip() for _, figure, _ in promises]
    assert [re.sub(r"[\d.]+", "N", figure) for figure in figures] == ["N ms", "N times", "True", "N", "N ms"]
    assert all(float(figure.split()[0]) > 0 for figure in (figures[0], figures[1], figures[4])), figures
    assert figures[3] == "0" and promises[2][2].strip() == promises[3][2].strip() == "met"
    assert f"| 10 | {results['turns']['cpu_ms_at']['10']:.2f} |" in text
    assert f"has {results['turns']['tokens']:,} tokens after 20 turns" in text and "(10 streams)" in text
    assert "20 sessions with 2 turns each" in text and "nan" not in text
