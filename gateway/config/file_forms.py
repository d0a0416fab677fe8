"""Models of tool_configs/*.yaml and mcp_servers.json as written, including keys of verl and other MCP clients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, PositiveFloat, Tag

from gateway.config.base import FrozenModel
from gateway.config.entries import (
    ClassEntry,
    FunctionEntry,
    InteractionEntry,
    McpEntry,
    SandboxToolsEntry,
    ServerToolsEntry,
)
from gateway.config.models import Server, Transport

FORMS: Mapping[str, type[ClassEntry | FunctionEntry | McpEntry | SandboxToolsEntry | ServerToolsEntry]] = {
    "function": FunctionEntry,
    "sandbox_tools": SandboxToolsEntry,
    "server": ServerToolsEntry,
    "mcp": McpEntry,
    "class_name": ClassEntry,
}
"""The key that identifies each form of a tool entry."""


def entry_form(raw: Any) -> str | None:
    """The form of a tool entry; None if no key identifies it."""
    if not isinstance(raw, dict):
        return None
    config = raw.get("config")
    if isinstance(config, dict) and (config.get("type") == "mcp" or config.get("use_mcp") is True):
        return "mcp"
    return next((key for key in FORMS if raw.get(key) is not None), None)


AnyTool = Annotated[
    Annotated[FunctionEntry, Tag("function")]
    | Annotated[SandboxToolsEntry, Tag("sandbox_tools")]
    | Annotated[ServerToolsEntry, Tag("server")]
    | Annotated[McpEntry, Tag("mcp")]
    | Annotated[ClassEntry, Tag("class_name")],
    Discriminator(entry_form),
]


class ToolsFile(FrozenModel):
    """A file in `tool_configs/`: tools, feedback interactions, or both."""

    tools: tuple[AnyTool, ...] = ()
    """The tools: a class, a function, tools in a sandbox, the tools of one MCP server, or those of a servers file."""
    interaction: Annotated[
        tuple[InteractionEntry, ...],
        BeforeValidator(
            lambda value: [value] if isinstance(value, dict) else value,
            json_schema_input_type=tuple[InteractionEntry, ...] | InteractionEntry,
        ),
    ] = ()
    """The feedback interactions; a single one needs no list."""


class ServerSection(Server):
    """A server with the keys that other MCP clients use, further ones of which are translated to these."""

    type: Transport | None = None
    """Other clients' name for `transport`, which takes precedence."""
    disabled: bool = False
    """Leaves out the server."""
    description: str = ""
    """For readers; not used."""
    always_allow: tuple[str, ...] = Field(default=(), alias="alwaysAllow")
    """Tools that other clients run without confirmation; accepted but not used, since there is no confirmation here."""
    auto_approve: tuple[str, ...] = Field(default=(), alias="autoApprove")
    """The same, under another client's name."""
    include_tools: tuple[str, ...] | None = Field(default=None, alias="includeTools")
    """The tools to offer unless an entry in YAML names others; all if left out."""
    exclude_tools: tuple[str, ...] = Field(default=(), alias="excludeTools")
    """Tools that are not offered unless an entry in YAML names them."""
    timeout_s: PositiveFloat | None = None
    """Deadline of one call, unless an entry in YAML has its own."""
    env_file: Path | None = Field(default=None, alias="envFile")
    """File of `NAME=value` lines with further environment variables; those in `env` take precedence."""

    @property
    def requested_transport(self) -> str | None:
        return self.transport or self.type

    def server_fields(self) -> dict[str, Any]:
        """The fields of `Server` that the file sets."""
        fields = {name: getattr(self, name) for name in Server.model_fields if name in self.model_fields_set}
        return fields if self.type is None else {"transport": self.type, **fields}


class ServersFile(FrozenModel):
    """A servers file in the common `mcpServers` format."""

    schema_url: str = Field(default="", alias="$schema")
    """JSON Schema of this file, for editors."""
    mcp_servers: dict[str, ServerSection] = Field(alias="mcpServers")
    """The servers by name."""
