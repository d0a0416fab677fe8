"""The interactions and the native tools that a YAML file declares, built as the gateway builds them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

from gateway.config.find import find
from gateway.config.load import Config, load
from gateway.errors import ConfigError
from gateway.feedback.base import BaseInteraction
from gateway.feedback.entry import Declared, build
from gateway.native.base import BaseTool


class ToolType(Enum):
    NATIVE = "native"
    MCP = "mcp"


def named_class(cls_name: str) -> Any:
    """The class behind `package.module.Class`; ImportError where there is none."""
    try:
        return find(cls_name)
    except ConfigError as error:
        raise ImportError(str(error)) from error


def initialize_interactions_from_config(interaction_config_file: str | Path) -> dict[str, BaseInteraction]:
    """By name; a class without one is called as it is, in small letters, without `Interaction` at its end."""
    config = _read(interaction_config_file)
    try:
        return build(
            Declared(find(entry.class_name, entry.file, entry.field), entry.config, entry.name, entry.owner)
            for entry in config.interactions
        )
    except ConfigError as error:
        raise ValueError(str(error)) from error


def initialize_tools_from_config(tools_config_file: str | Path) -> list[BaseTool]:
    """The native ones; MCP servers are opened for a rollout, by the gateway."""
    from gateway.build import class_tool
    from gateway.config.entries import ClassEntry

    config = _read(tools_config_file)
    if config.servers:
        remedy = "open a session on `gateway.Gateway.load(file)`, which has them"
        raise NotImplementedError(f"{tools_config_file}: MCP tools live with a rollout's session; {remedy}")
    return [class_tool(entry) for entry in config.tools if isinstance(entry, ClassEntry)]


def _read(file: str | Path) -> Config:
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        return load(path, None)
    except ConfigError as error:
        raise ValueError(str(error)) from error
