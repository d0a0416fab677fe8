"""The numbers in the README are those that the benchmarks wrote down."""

from __future__ import annotations

from bench.readme import README, filled, results


def test_the_readmes_tables_are_made_from_the_newest_results() -> None:
    assert filled(README.read_text()) == README.read_text(), "run: python bench/readme.py --write"


def test_no_required_conformance_scenario_fails_and_every_failure_has_the_cause_that_is_told() -> None:
    for score in results("conformance.json")["scores"]:
        assert score["required"]["passed"] == score["required"]["total"]
        assert all(failure["scenario"].startswith("tasks-") for failure in score["failures"])


def test_every_promise_about_cost_is_kept() -> None:
    told = (README.parent / "bench" / "results" / "gateway.md").read_text()
    promises = [line for line in told.splitlines() if line.endswith(("| met |", "| **missed** |"))]
    assert len(promises) >= 8 and not [line for line in promises if "missed" in line]
