"""The numbers in the README are those that the benchmarks wrote down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def written(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / name).read_text())


def test_the_conformance_table_is_what_the_suite_said() -> None:
    for score in written("conformance.json")["scores"]:
        required, checks = score["required"], score["checks"]
        row = (
            f"| {score['requirements']} | {required['passed']} of {required['total']} "
            f"| {checks['passed']} | {checks['failed']} |"
        )
        assert row in README
        assert not any(failure["required"] for failure in score["failures"])
        assert all(failure["scenario"].startswith("tasks-") for failure in score["failures"])


def test_the_costs_are_those_of_the_newest_run() -> None:
    rows = {(row["title"], row["behind"]): row["at"]["64"]["cpu_ms"] for row in written("gateway.json")["rows"]}
    shown = {
        "a native tool in process": rows["mtrl in process", "native"],
        "a native tool over HTTP": rows["mtrl over HTTP", "native"],
        "a stdio MCP tool over HTTP, pooled": rows["mtrl over HTTP", "stdio"],
        "an HTTP MCP tool over HTTP": rows["mtrl over HTTP", "http"],
    }
    peers = [rows["FastMCP proxy", "stdio"], rows["FastMCP proxy", "http"]]
    for name, cpu_ms in shown.items():
        assert f"| {name} | {cpu_ms:.2f} ms |" in README
    for cpu_ms in peers:
        assert f"FastMCP 4.1.6 proxy | {cpu_ms:.3g} ms |" in README
