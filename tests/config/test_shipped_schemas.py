"""The schemas that editors read are those of the models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from gateway.config import schema

ROOT = Path(__file__).parents[2]
TOOLS, SERVERS = (jsonschema_rs.validator_for(json.loads(text)) for text in schema.texts().values())


def test_the_shipped_schemas_are_those_of_the_models() -> None:
    for file, text in schema.texts().items():
        assert file.read_text() == text, "run `python -m gateway.config.schema --write`"


def test_every_field_is_described() -> None:
    for text in schema.texts().values():
        for name, model in {**json.loads(text)["$defs"], "file": json.loads(text)}.items():
            for field, about in model.get("properties", {}).items():
                assert about.get("description"), f"{name}.{field}"


def test_the_command_prints_what_it_would_write(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["schema"])
        schema.main()
    assert capsys.readouterr().out == "".join(schema.texts().values())


def test_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shipped,) = [parts for file, parts in schema.SHIPPED.items() if file.name == "tools.schema.json"]
    monkeypatch.setattr(schema, "SHIPPED", {tmp_path / "x.json": shipped})
    monkeypatch.setattr(sys, "argv", ["schema", "--write"])
    schema.main()
    assert json.loads((tmp_path / "x.json").read_text())["title"] == "mtrl tool_configs/*.yaml"


@pytest.mark.parametrize("file", sorted((ROOT / "tool_configs").glob("*.yaml")), ids=lambda file: file.name)
def test_the_shipped_yaml_is_valid(file: Path) -> None:
    assert TOOLS.is_valid(yaml.safe_load(file.read_text()))


def test_the_shipped_servers_file_is_valid() -> None:
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
def test_every_form_is_valid_and_an_unknown_key_in_it_is_not(entry: dict[str, Any]) -> None:
    assert TOOLS.is_valid({"tools": [entry]})
    assert not TOOLS.is_valid({"tools": [{**entry, "timeout": 1}]})
    assert not TOOLS.is_valid({"tools": [entry], "tool": []})


def test_interactions_are_valid_alone_and_in_a_list() -> None:
    entry = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}
    assert TOOLS.is_valid({"interaction": entry})
    assert TOOLS.is_valid({"interaction": [{**entry, "name": "gsm8k"}]})
    assert not TOOLS.is_valid({"interaction": [{**entry, "nmae": "gsm8k"}]})


def test_a_servers_file_of_another_client_is_valid_and_an_unknown_key_is_not() -> None:
    server = {"type": "streamableHttp", "url": "https://a", "disabled": False, "alwaysAllow": [], "autoApprove": []}
    assert SERVERS.is_valid({"mcpServers": {"a": server}})
    assert not SERVERS.is_valid({"mcpServers": {"a": {**server, "uri": "x"}}})
    assert not SERVERS.is_valid({"servers": {}})
