"""Tests that the gateway benchmark measures every row and every call succeeds; times are not checked."""

from __future__ import annotations

from pathlib import Path

from tests.bench.run_script import measure

PEERS = ("fastmcp-native", "fastmcp-stdio", "fastmcp-http")
"""Measured only where they are installed."""


def test_each_row_is_measured_beside_its_floor_and_every_call_returns_its_own_token(tmp_path: Path) -> None:
    rows = {row["key"]: row for row in measure("gateway", "--quick", tmp_path)["rows"]}
    assert {"raw-stdio", "raw-http", "native", "stdio", "http", "front-http", "inside-thread", *PEERS} <= rows.keys()
    for key, row in rows.items():
        assert key in PEERS or not row["problem"], (key, row["problem"])
        assert all(at["right"] == at["calls"] > 0 for at in row["at"].values()), key
        if not row["problem"]:
            assert list(row["at"]) == ["1", "8"], key
            ratios = row["of_floor"] if row["floor"] else {}
            assert not row["floor"] or ratios.keys() == {"1", "8"}, key
            assert all(ratio["low"] > 0 for ratio in ratios.values()), key
