"""Tests of the shipped JSON Schemas."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from gateway.config import editor_schema

ROOT = Path(__file__).parents[2]
TOOLS, SERVERS = (jsonschema_rs.validator_for(json.loads(text)) for text in editor_schema.schema_texts().values())


def test_shipped_schemas_match_the_models() -> None:
    for file, text in editor_schema.schema_texts().items():
        assert file.read_text() == text, "run `python -m gateway.config.editor_schema --write`"


@pytest.mark.parametrize("file", sorted((ROOT / "tool_configs").glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_yaml_matches_the_schema(file: Path) -> None:
    assert TOOLS.is_valid(yaml.safe_load(file.read_text()))


def test_shipped_servers_file_matches_the_schema() -> None:
    assert SERVERS.is_valid(json.loads((ROOT / "mcp_servers.json").read_text()))
