"""Tests of the shipped JSON Schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


FORMS: dict[str, Any] = {
    "verl's native class": {
        "class_name": "verl.tools.gsm8k_tool.Gsm8kTool",
        "config": {"type": "native"},
        "tool_schema": {
            "type": "function",
            "function": {
                "name": "calc_gsm8k_reward",
                "description": "Rewards.",
                "parameters": {"type": "object", "properties": {"answer": {"anyOf": [{"$ref": "#/$defs/x"}]}}},
            },
        },
    },
    "verl's MCP template": {
        "class_name": "",
        "config": {"type": "mcp"},
        "mcp": {"mcp_servers_config_path": "./mcp_server.json", "tool_selected_list": {}},
    },
    "a server": {"server": "s", "allow": ["a"], "result_limit": {"chars": 1, "side": "left"}, "isolation": "session"},
}


@pytest.mark.parametrize("entry", FORMS.values(), ids=FORMS)
def test_schema_accepts_every_form_but_no_unknown_key(entry: dict[str, Any]) -> None:
    assert TOOLS.is_valid({"tools": [entry]})
    assert not TOOLS.is_valid({"tools": [{**entry, "timeout": 1}]})
    assert not TOOLS.is_valid({"tools": [entry], "tool": []})
