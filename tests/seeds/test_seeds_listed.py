"""Tests that the README of this folder lists exactly the existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (?P<where>[^|]+) \| (?P<example>[^|]+) \| `(?P<test>[\w/]+\.py::test_\w+)` \|$")


def listed() -> list[str]:
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    return [found["test"] for line in lines if (found := ROW.match(line))]


def list_tests(file: Path) -> set[str]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_listed_tests_exist_and_those_of_this_folder_are_listed() -> None:
    """A test of this folder is named by its file alone; what other tests show is named from `tests` on."""
    for name in listed():
        file, _, test = name.partition("::")
        assert test in list_tests(HERE.parent / file if "/" in file else HERE / file), name
    here = {f"{file.name}::{name}" for file in HERE.glob("test_seed_*.py") for name in list_tests(file)}
    assert {name for name in here if "::test_" in name} <= {*listed()}
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| Where ")]
    assert len(rows) == len(listed()), "every row names a test"
