"""Tests that the numbers in the README and docs/results.md are those of the latest benchmark results."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from bench.peers import newest_release
from bench.readme import PAGE, PAGES, README, RESULTS, filled, results


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_match_the_latest_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, PAGES[page]) == text, "run: python bench/readme.py --write"


NOT_SCORED = {
    "server": ("tasks-",),
    "client": ("auth/dpop", "auth/enterprise-managed", "auth/wif-jwt-bearer", "json-schema-2020-12-preservation"),
}
"""Scenarios that fail, none of which is required: extensions, and one that came after the release."""


def test_all_required_conformance_scenarios_pass() -> None:
    for score in results("conformance.json")["scores"]:
        assert score["required"]["passed"] == score["required"]["total"]
        assert all(failure["scenario"].startswith(NOT_SCORED[score["half"]]) for failure in score["failures"])


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.name)
def test_each_missed_target_of_a_call_stands_beside_its_figure(page: Path) -> None:
    report = (RESULTS / "gateway.md").read_text()
    missed = [line for line in report.splitlines() if line.endswith("| **missed** |")]
    table = re.search(r"<!-- costs -->(.*)<!-- /costs -->", page.read_text(encoding="utf-8"), re.DOTALL)
    assert table is not None
    assert table[1].count("missed") == len([line for line in missed if "x of " in line or "as much" in line])


@cache
def newest_fastmcp() -> Version:
    newest = newest_release("fastmcp")
    if newest is None:
        pytest.skip("no package index can be reached")
    return Version(newest)


@pytest.mark.parametrize("file", ["Makefile", "README.md"])
def test_fastmcp_is_at_most_one_minor_release_behind_the_newest(file: str) -> None:
    """The pin of the tests, and the release that the published ratios name."""
    text = (README.parent / file).read_text()
    found = re.search(r"fastmcp==([\d.]+)|FastMCP (\d[\d.]*\d)", text)
    assert found is not None
    used, newest = Version(found[1] or found[2]), newest_fastmcp()
    assert used.major == newest.major and newest.minor - used.minor <= 1, (
        f"{used} of {newest}: `make bench`, and a new pin"
    )
