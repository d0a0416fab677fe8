"""Checks the YAML and JSON of a page against the models that read such files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from gateway.config.load import load_config
from tests.docs.blocks import Block
from trainer.train.settings import TrainSettings

STAND_IN = {"command": "true"}
"""A server that a fragment names and its page shows elsewhere, or not at all."""
RUN_FILE = {*TrainSettings.model_fields}


def validate(block: Block, page: Sequence[Block], place: Path) -> None:
    """A fragment must fit what it is a fragment of: tools, interactions, servers, a run file, or a row of data."""
    values = _parse(block)
    for value in values:
        keys = {*value} if isinstance(value, dict) else set()
        if "mcpServers" in keys:
            _load(None, value)
        elif keys and keys <= {"tools", "interaction"} and _are_entries(value):
            _load(value, {"mcpServers": _servers(value, page, place)})
        elif block.language == "yaml" and keys and keys <= RUN_FILE:
            TrainSettings.model_validate({"model": "models/any", "data": "tasks.jsonl", **value})
        elif block.language == "yaml":
            raise AssertionError(
                f"{block}: neither tools, interactions nor settings of a run: {sorted(keys)}; "
                "a file of another kind is a `text` block"
            )


def _parse(block: Block) -> list[Any]:
    if block.language == "yaml":
        return [yaml.safe_load(block.text)]
    if block.language == "jsonl" or (block.file or "").endswith(".jsonl"):
        return [json.loads(line) for line in block.text.splitlines() if line.strip()]
    return [json.loads(block.text)]


def _are_entries(value: dict[str, Any]) -> bool:
    return all(isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
               for entries in value.values())  # fmt: skip


def _servers(value: dict[str, Any], page: Sequence[Block], place: Path) -> dict[str, Any]:
    """The servers that the page shows, and a stand-in for those that it only names."""
    known: dict[str, Any] = {}
    for block in page:
        if block.language == "json" and "mcpServers" in block.text:
            known |= json.loads(block.text)["mcpServers"]
    named = {entry["server"] for entry in value.get("tools", []) if isinstance(entry.get("server"), str)}
    return {name: known.get(name, STAND_IN) for name in named}


def _load(tools: dict[str, Any] | None, servers: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "mcp_servers.json").write_text(json.dumps(servers))
        if tools is not None:
            (place / "tools.yaml").write_text(yaml.safe_dump(tools))
        environment = {"MTRL_PYTHON": "python"}
        load_config(place / "tools.yaml" if tools is not None else None, place / "mcp_servers.json", environment)
