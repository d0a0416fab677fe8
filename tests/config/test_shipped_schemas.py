"""Tests of the shipped JSON Schemas."""

from __future__ import annotations

import json
import sys
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


def test_every_field_has_a_description() -> None:
    for text in editor_schema.schema_texts().values():
        for name, model in {**json.loads(text)["$defs"], "file": json.loads(text)}.items():
            for field, about in model.get("properties", {}).items():
                assert about.get("description"), f"{name}.{field}"


def test_command_prints_the_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["schema"])
        editor_schema.main()
    assert capsys.readouterr().out == "".join(editor_schema.schema_texts().values())


def test_command_writes_the_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shipped,) = [parts for file, parts in editor_schema.SCHEMA_FILES.items() if file.name == "tools.schema.json"]
    monkeypatch.setattr(editor_schema, "SCHEMA_FILES", {tmp_path / "x.json": shipped})
    monkeypatch.setattr(sys, "argv", ["schema", "--write"])
    editor_schema.main()
    assert json.loads((tmp_path / "x.json").read_text())["title"] == "mtrl tool_configs/*.yaml"


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
    "a class with its own schema": {"class_name": "a.B", "config": {"type": "native"}, "tool_schema": None},
    "verl's MCP": {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"rate_limit": 120, "timeout": 120, "type": "mcp"},
        "mcp": {"mcp_servers_config_path": "./mcp_server.json", "tool_selected_list": ["tavily_search_tool"]},
    },
    "verl's MCP template": {
        "class_name": "",
        "config": {"type": "mcp"},
        "mcp": {"mcp_servers_config_path": "./mcp_server.json", "tool_selected_list": {}},
    },
    "a function": {"function": "a:b", "result_limit": 100, "pure": True},
    "a server": {"server": "s", "allow": ["a"], "result_limit": {"chars": 1, "side": "left"}, "isolation": "session"},
}


@pytest.mark.parametrize("entry", FORMS.values(), ids=FORMS)
def test_schema_accepts_every_form_but_no_unknown_key(entry: dict[str, Any]) -> None:
    assert TOOLS.is_valid({"tools": [entry]})
    assert not TOOLS.is_valid({"tools": [{**entry, "timeout": 1}]})
    assert not TOOLS.is_valid({"tools": [entry], "tool": []})


def test_schema_accepts_one_interaction_or_a_list() -> None:
    entry = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}
    assert TOOLS.is_valid({"interaction": entry})
    assert TOOLS.is_valid({"interaction": [{**entry, "name": "gsm8k"}]})
    assert not TOOLS.is_valid({"interaction": [{**entry, "nmae": "gsm8k"}]})


def test_schema_accepts_keys_of_other_clients_only() -> None:
    server = {"type": "streamableHttp", "url": "https://a", "disabled": False, "alwaysAllow": [], "autoApprove": []}
    assert SERVERS.is_valid({"mcpServers": {"a": server}})
    assert not SERVERS.is_valid({"mcpServers": {"a": {**server, "uri": "x"}}})
    assert not SERVERS.is_valid({"servers": {}})
