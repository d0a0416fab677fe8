"""Tests that the benchmark of sandboxes measures every row and loses nothing; no time is checked."""

from __future__ import annotations

import subprocess
from pathlib import Path
from tempfile import gettempdir

import pytest

from bench.sandbox import MANY, SMALL
from tests.bench.run_script import measure


def test_starts_and_calls_are_measured_beside_their_floors_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    results = measure("sandbox", "--small", tmp_path)
    for name in ("commands", "servers", "spares", "calls"):
        row = results[name]
        assert row["bare_ms"] > 0 and row["ratio"] == row["sandbox_ms"] / row["bare_ms"]
    assert [*results["many"]] == [*MANY] and all(
        (row["count"], row["lost"]) == (SMALL.at_once, 0) and row["memory_mb"] > 1 for row in results["many"].values()
    )
    kind = subprocess.run(["stat", "--file-system", "--format=%T", gettempdir()], capture_output=True, text=True)
    is_disk = kind.stdout.strip() not in ("tmpfs", "ramfs")  # A bare process writes wherever the folder is.
    assert [row["disk_mb"] >= 1 for row in results["many"].values()] == [is_disk, False, False]
    assert len(results["promises"]) == 3
    assert "| sandboxes with a root under an overlay |" in (tmp_path / "sandbox.md").read_text()
