"""The page of data rows has every field that the trainer reads, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from gateway.errors import ConfigErrors
from tests.docs.reference import FOLDER, ROOT
from trainer.data.row_media import RowMedia
from trainer.data.row_to_task import row_to_task
from trainer.rollout.settings import ColumnSettings
from trainer.rollout.task import KIND_COLUMNS

DESCRIBED = {*re.findall(r"^\| `(.+?)` \| ", (FOLDER / "rows.md").read_text(encoding="utf-8"), re.M)}
READ_LATER = {*KIND_COLUMNS, "environment", "environment_row", "env_config", "ctx_config"}
"""Fields that a row's task does not depend on: metrics, environments and reward functions read them."""


class RecordingRow(dict[str, Any]):
    """A row that notes the fields that are asked for, by their paths."""

    def __init__(self, row: dict[str, Any], read: set[str], prefix: str = "") -> None:
        super().__init__(row)
        self._read, self._prefix = read, prefix

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(self._prefix + key)
        value = super().get(key, default)
        is_row = isinstance(value, dict) and key in ("extra_info", "reward_model")
        return RecordingRow(value, self._read, f"{self._prefix}{key}.") if is_row else value


ROWS: list[dict[str, Any]] = [
    {},
    {"extra_info": {}, "reward_model": {}},
    {"prompt": "x", "system": "s", "data_source": "gsm8k", "extra_info": {}, "reward_model": {}, "state": "s"},
    {"prompt": "x", "interaction_kwargs": {"name": "judge"}, "end_state": {"notes": "sha256:0"}},
]


def read_fields() -> set[str]:
    read: set[str] = set()
    for row in ROWS:
        try:
            row_to_task(RecordingRow(row, read), "rows:1", RowMedia(ColumnSettings(), Path()))
        except ConfigErrors:
            continue
    return read


def test_every_field_that_a_row_is_read_for_is_described_and_every_described_field_is_read() -> None:
    assert read_fields() - DESCRIBED == set()
    assert DESCRIBED - READ_LATER - read_fields() == set()


def fields_read_from_columns(file: Path) -> set[str]:
    """The constants with which code asks for a column: `....columns["name"]` and `....columns.get("name")`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Subscript):
            source, key = node.value, node.slice
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            source, key = node.func.value, node.args[0]
        else:
            continue
        name = source.attr if isinstance(source, ast.Attribute) else source.id if isinstance(source, ast.Name) else ""
        if name == "columns" and isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.add(key.value)
    return found


def test_fields_that_rewards_and_environments_read_are_described() -> None:
    houses = (file for house in ("trainer", "mtrl_plugins") for file in (ROOT / house).rglob("*.py"))
    files = [file for file in houses if "demo" not in file.name and "demo" not in file.parts]
    read = {name: file.name for file in files for name in fields_read_from_columns(file)}
    assert {"end_state", "data_source", "extra_info", "id"} <= read.keys()
    assert {name: file for name, file in read.items() if name not in DESCRIBED} == {}
