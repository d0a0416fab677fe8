"""A file as people write it, other clients' and verl's habits included; what is meant is in `entries` and `models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

from gateway.config.entries import ClassEntry, FunctionEntry, InteractionEntry, McpEntry, ServerTools
from gateway.config.models import Frozen, Server, Transport

FORMS: Mapping[str, type[ClassEntry | FunctionEntry | McpEntry | ServerTools]] = {
    "function": FunctionEntry,
    "server": ServerTools,
    "mcp": McpEntry,
    "class_name": ClassEntry,
}
"""The key that tells a form, and the form."""


def form(raw: Any) -> str | None:
    """Which form an entry has; None where no key tells."""
    if not isinstance(raw, dict):
        return None
    config = raw.get("config")
    if isinstance(config, dict) and (config.get("type") == "mcp" or config.get("use_mcp") is True):
        return "mcp"
    return next((key for key in FORMS if raw.get(key) is not None), None)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


AnyTool = Annotated[
    Annotated[FunctionEntry, Tag("function")]
    | Annotated[ServerTools, Tag("server")]
    | Annotated[McpEntry, Tag("mcp")]
    | Annotated[ClassEntry, Tag("class_name")],
    Discriminator(form),
]


class ToolsFile(Frozen):
    """A file of `tool_configs/`: tools, feedback interactions, or both."""

    tools: tuple[AnyTool, ...] = ()
    """The tools: a class, a function, the tools of one server, or those of a whole servers file."""
    interaction: Annotated[
        tuple[InteractionEntry, ...],
        BeforeValidator(_listed, json_schema_input_type=tuple[InteractionEntry, ...] | InteractionEntry),
    ] = ()
    """The feedback interactions; a single one needs no list."""


class WrittenServer(Server):
    """A server with the keys that other clients know."""

    type: Transport | None = None
    """Other clients' word for `transport`, which goes first."""
    disabled: bool = False
    """The server is left out, as if its entry were not there."""
    description: str = ""
    """For people; not used."""
    always_allow: tuple[str, ...] = Field(default=(), alias="alwaysAllow")
    """Tools that another client runs unasked; accepted and not used, since nobody is asked here."""
    auto_approve: tuple[str, ...] = Field(default=(), alias="autoApprove")
    """The same in another client's words."""

    @property
    def way(self) -> str | None:
        return self.transport or self.type

    def meant(self) -> dict[str, Any]:
        """The fields of the server itself, as far as they were written."""
        given = {name: getattr(self, name) for name in Server.model_fields if name in self.model_fields_set}
        return given if self.type is None else {"transport": self.type, **given}


class ServersFile(Frozen):
    """A servers file in the common `mcpServers` form."""

    schema_url: str = Field(default="", alias="$schema")
    """Where an editor finds the schema of this file."""
    mcp_servers: dict[str, WrittenServer] = Field(alias="mcpServers")
    """The servers by name."""
