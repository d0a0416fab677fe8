"""The benchmark of rollout workers in small, with a real worker process."""

from __future__ import annotations

from pathlib import Path

from tests.bench.run_script import run_script


def test_benchmark_of_workers_measures_turns_and_memory(tmp_path: Path) -> None:
    out = tmp_path / "workers.md"
    run_script("workers", "--small", "--out", out)
    rows = [line.split("|")[1:-1] for line in out.read_text().splitlines() if line.startswith("|")]
    paces = [row for row in rows if len(row) == 4 and row[0].strip().isdecimal()]
    assert [row[0].strip() for row in paces] == ["0", "1", "1"]  # The last one with an engine that takes its time.
    assert all(float(row[1].replace(",", "")) > 0 for row in paces)
    memory = [row for row in rows if len(row) == 3 and row[0].strip().isdecimal()]
    assert [(row[0].strip(), row[1].strip()) for row in memory] == [("0", "16"), ("1", "16")]
