"""Tests that the gateway benchmark measures every row and every call succeeds; times are not checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PEERS = {"fastmcp-native", "fastmcp-stdio", "fastmcp-http"}
"""Measured only where they are installed."""
ROWS = PEERS | {
    "bare-http",
    "bare-mcp",
    "raw-stdio",
    "raw-http",
    "anew-http",
    "native",
    "stdio",
    "http",
    "no-uvloop",
    "session",
    "front-native",
    "front-stdio",
    "front-http",
    "inside-native",
    "inside-thread",
    "inside-stdio",
    "inside-http",
}


@pytest.fixture(scope="module")
def results_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(BENCH / "gateway.py"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def results(results_folder: Path) -> Any:
    return json.loads((results_folder / "gateway.json").read_text())


def test_every_row_is_measured_and_every_call_returns_its_own_token(results: Any) -> None:
    rows = {row["key"]: row for row in results["rows"]}
    assert rows.keys() == ROWS
    assert {key: row["problem"] for key, row in rows.items() if row["problem"] and key not in PEERS} == {}
    for row in rows.values():
        for at in row["at"].values():
            assert at["right"] == at["calls"] > 0, row["key"]
        assert row["problem"] or list(row["at"]) == ["1", "8"]


def test_every_row_with_a_floor_is_compared_with_it_in_the_same_rounds(results: Any) -> None:
    for row in results["rows"]:
        if row["floor"] and not row["problem"]:
            assert row["of_floor"].keys() == {"1", "8"}, row["key"]
            assert all(ratio["low"] > 0 for ratio in row["of_floor"].values()), row["key"]
