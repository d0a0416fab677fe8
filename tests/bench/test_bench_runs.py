"""The bench still measures what it says: every row is there and every call came back. No time is ever judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PEERS = {"fastmcp-stdio", "fastmcp-http"}
"""They are measured where they are installed, and otherwise say that they are not."""
ROWS = PEERS | {
    "raw-stdio",
    "raw-http",
    "anew-http",
    "native",
    "stdio",
    "http",
    "no-uvloop",
    "no-httptools",
    "front-native",
    "front-stdio",
    "inside-native",
    "inside-thread",
    "inside-stdio",
    "inside-http",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(BENCH / "gateway.py"), "--quick", "--out", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return out


@pytest.fixture(scope="module")
def told(results: Path) -> Any:
    return json.loads((results / "gateway.json").read_text())


def test_every_row_is_measured_and_every_call_brings_its_own_answer_back(told: Any) -> None:
    rows = {row["key"]: row for row in told["rows"]}
    assert rows.keys() == ROWS
    assert {key: row["problem"] for key, row in rows.items() if row["problem"] and key not in PEERS} == {}
    for row in rows.values():
        for at in row["at"].values():
            assert at["right"] == at["calls"] > 0, row["key"]
        assert row["problem"] or list(row["at"]) == ["1", "8"]


def test_calls_of_many_sessions_at_once_are_neither_lost_nor_doubled(told: Any) -> None:
    scale = told["scale"]
    assert (scale["sessions"], scale["left_open"]) == (20, 0)
    assert [wave["tool"] for wave in scale["waves"]] == ["hold", "stdio_hold"]
    for wave in scale["waves"]:
        assert (wave["calls"], wave["answered"], wave["lost"], wave["duplicated"]) == (80, 80, 0, 0)


def test_the_table_has_a_line_for_each_row_and_a_word_on_each_promise(results: Path, told: Any) -> None:
    text = (results / "gateway.md").read_text()
    for row in told["rows"]:
        assert f"| {row['title']} | {row['behind']} |" in text
    assert text.count("| met |") + text.count("| **missed** |") >= 6
    assert "none lost or doubled" in text and "KiB for an idle session" in text
