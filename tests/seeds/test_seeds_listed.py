"""Tests that the README of this folder lists exactly the existing tests."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| (?P<where>[^|]+) \| (?P<example>[^|]+) \| `(?P<test>test_seed_\w+\.py::test_\w+)` \|$")
DOCUMENTS = 5


def listed() -> list[str]:
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    return [found["test"] for line in lines if (found := ROW.match(line))]


def there() -> set[str]:
    names = set()
    for file in HERE.glob("test_seed_*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                names.add(f"{file.name}::{node.name}")
    return names


def test_listed_tests_are_the_existing_tests() -> None:
    assert set(listed()) == there()


def test_every_row_names_a_test() -> None:
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| Where ")]
    assert len(rows) == len(listed())
    assert sum(line.startswith("| Where ") for line in lines) == DOCUMENTS


def test_verl_and_ms_swift_are_not_installed() -> None:
    assert importlib.util.find_spec("verl") is None and importlib.util.find_spec("swift") is None
