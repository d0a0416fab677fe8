"""An entry of a file says which tools there are and how patient to be with them; four forms, one set of limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from gateway.config.models import Frozen, Isolation, Limits, MediaLimits, mistake


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry stands. It does not change what the entry means, so that all places are equal."""

    file: Path = dataclasses.field(default=Path(), compare=False)
    field: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        return f"{shown(self.file)} {self.field}".strip()


def shown(file: Path) -> Path:
    """A file as its owner would type it."""
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


class Entry(Frozen):
    """Something that a file declares, and that remembers where."""

    _place: Place = PrivateAttr(default=Place())

    @property
    def file(self) -> Path:
        return self._place.file

    @property
    def field(self) -> str:
        return self._place.field

    @property
    def owner(self) -> str:
        """`tool_configs/maths.yaml tools[0]`, for messages."""
        return str(self._place)

    def placed(self, place: Place) -> Self:
        self._place = place
        return self

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [("owner", self.owner), *super().__repr_args__()]


class FunctionSchema(Frozen):
    name: str = Field(min_length=1)
    """The name that the policy writes."""
    description: str = ""
    """What the policy reads about it."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    """The arguments: anything that JSON Schema allows, passed on as it stands."""
    strict: bool = False
    """Asks an OpenAI-like API to hold the policy to the schema."""


class ToolSchema(Frozen):
    type: Literal["function"] = "function"
    """Always `function`."""
    function: FunctionSchema
    """The OpenAI function schema."""


Importable = Annotated[str, Field(min_length=1, pattern=r"^[\w.]+(:[\w.]+|\.\w+)$")]
"""`package.module:name` or `package.module.name`; the folder of the file is importable."""


class ClassEntry(Entry, Limits):
    """A Python class as a tool, in verl's words: one instance for each rollout."""

    class_name: Importable
    """The class, `package.module.Class`."""
    config: dict[str, Any] = {}
    """What the class is built with; `type: native` is verl's word for this form."""
    tool_schema: ToolSchema | None = None
    """The tool's schema; a class may bring its own instead."""
    description: str | None = None
    """Replaces the description of the schema."""
    prefix: str = ""
    """Goes before the tool's name."""

    @property
    def known_name(self) -> str | None:
        return self.prefix + self.tool_schema.function.name if self.tool_schema else None


class FunctionEntry(Entry, Limits):
    """A Python function as a tool: type hints and docstring make the schema."""

    function: Importable
    """The function, `package.module:name`."""
    name: str | None = Field(default=None, min_length=1)
    """Its name for the policy, where it is not the function's own."""
    description: str | None = None
    """Replaces the docstring."""
    parameters: dict[str, Any] | None = None
    """Replaces the schema made from the type hints: anything that JSON Schema allows."""
    prefix: str = ""
    """Goes before the tool's name."""

    @property
    def known_name(self) -> str | None:
        return self.prefix + self.name if self.name else None


class Offer(Entry, Limits):
    """Which tools of a server are offered, and how; by itself, all of them with the defaults."""

    allow: tuple[str, ...] | None = None
    """The tools that are offered; all of them where it is left out."""
    prefix: str = ""
    """Goes before each tool's name; `{server}` in it stands for the server's name."""
    parse: Importable | None = None
    """The class that reads results, derived from `gateway.upstream.hook.MCPBaseTool`."""
    parse_tools: dict[str, Importable] = {}
    """The same for single tools."""
    isolation: Isolation | None = None
    """Replaces what the servers file says."""
    warm: Annotated[int, Field(ge=0)] | None = None
    """Replaces what the servers file says."""
    most: PositiveInt | None = None
    """Replaces what the servers file says."""
    idle_s: PositiveFloat | None = None
    """Replaces what the servers file says."""
    connect_timeout_s: PositiveFloat | None = None
    """Replaces what the servers file says."""
    result_bytes: PositiveInt | None = None
    """Replaces what the servers file says."""

    @property
    def selected(self) -> tuple[str, ...] | None:
        """The tools asked for by name; None is all."""
        return self.allow

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the hook class is built with."""
        return {}

    def names(self, server: str, tool: str) -> bool:
        """Whether this entry asks for the tool by name, bare or as `server_tool`."""
        return self.selected is not None and (tool in self.selected or f"{server}_{tool}" in self.selected)

    def hook(self, tool: str) -> str | None:
        """The class that reads this tool's results; None is the ordinary one."""
        return self.parse_tools.get(tool, self.parse)

    def prefix_for(self, server: str) -> str:
        return self.prefix.replace("{server}", server)


class McpConfig(Frozen):
    """verl's settings of an MCP tool; the hook class may have more of its own."""

    model_config = ConfigDict(extra="allow")

    type: Literal["mcp"] = "mcp"
    """verl's word for this form."""
    rate_limit: PositiveFloat | None = None
    """verl's word for `rate_per_s`, which goes first."""
    timeout: PositiveFloat | None = None
    """verl's word for `timeout_s`, which goes first."""


def _selected(value: Any) -> Any:
    """verl's page writes `{}` for all."""
    return value or None


class Mcp(Frozen):
    mcp_servers_config_path: str = Field(min_length=1)
    """A servers file, seen from this file's folder, or from the working folder where it is not there."""
    tool_selected_list: Annotated[
        tuple[str, ...] | None,
        BeforeValidator(_selected, json_schema_input_type=tuple[str, ...] | dict[str, Any] | None),
    ] = None
    """The tools that are offered, bare or as `server_tool`; all where it is left out or empty."""


class McpEntry(Offer):
    """All servers of a servers file, in verl's words."""

    mcp: Mcp
    """The servers, and which of their tools."""
    class_name: Importable | Literal[""] = ""
    """The class that reads results, derived from `MCPBaseTool`; empty for the ordinary one."""
    config: McpConfig = McpConfig()
    """verl's settings."""

    @property
    def selected(self) -> tuple[str, ...] | None:
        return self.mcp.tool_selected_list if self.allow is None else self.allow

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.config.model_dump(exclude_none=True)

    def hook(self, tool: str) -> str | None:
        return super().hook(tool) or self.class_name or None

    def in_our_words(self) -> Self:
        """verl's deadline and rate, where ours are not given."""
        theirs = {"timeout_s": self.config.timeout, "rate_per_s": self.config.rate_limit}
        update = {name: value for name, value in theirs.items() if value and name not in self.model_fields_set}
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _once(self) -> Self:
        if self.allow is not None and self.mcp.tool_selected_list is not None:
            raise mistake("`allow` and `tool_selected_list` say the same thing twice", "remove one of them")
        if self.parse is not None and self.class_name:
            raise mistake("`parse` and `class_name` name two hooks", "remove one of them")
        return self


class ServerTools(Offer):
    """One server of the servers file."""

    server: str = Field(min_length=1)
    """Its name there."""


class InteractionEntry(Entry):
    """A feedback interaction, in verl's words."""

    name: str = ""
    """What a session asks for; made from the class where it is left out (`Gsm8kInteraction` is `gsm8k`)."""
    class_name: Importable
    """The class, `package.module.Class`."""
    config: dict[str, Any] = {}
    """What the class is built with, the name beside it."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one of its turns."""
    media: MediaLimits = MediaLimits()
    """What the policy is shown of an answer's pictures, sounds and films."""

    @property
    def offered_name(self) -> str:
        return self.name or interaction_name(self.class_name)


def interaction_name(class_name: str) -> str:
    """`Gsm8kInteraction`, or its whole path, is `gsm8k`."""
    last = class_name.replace(":", ".").rpartition(".")[2]
    return (last.removesuffix("Interaction") or last).lower()
