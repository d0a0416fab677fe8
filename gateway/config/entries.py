"""Models of the entries in tool_configs/*.yaml: classes, functions, tools of MCP servers, and interactions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, PrivateAttr, model_validator

from gateway.config.base import FrozenModel, rule_error
from gateway.config.models import Isolation, Limits, MediaLimits, OnClash
from gateway.sandbox.grade_settings import GradeSettings, check_places
from gateway.sandbox.sandbox_settings import SandboxSettings, check_is_local


@dataclass(frozen=True, slots=True)
class Location:
    """File and field of an entry. All locations are equal, so that they don't affect the comparison of entries."""

    file: Path = dataclasses.field(default=Path(), compare=False)
    field: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        return f"{display_path(self.file)} {self.field}".strip()


def display_path(file: Path) -> Path:
    """The path relative to the working folder, if it is inside."""
    working_folder = Path.cwd()
    return file.relative_to(working_folder) if file.is_relative_to(working_folder) else file


class Entry(FrozenModel):
    """Base of everything that a file declares; knows its location."""

    _location: Location = PrivateAttr(default=Location())

    @property
    def file(self) -> Path:
        return self._location.file

    @property
    def field(self) -> str:
        return self._location.field

    @property
    def owner(self) -> str:
        """`tool_configs/maths.yaml tools[0]`, for error messages."""
        return str(self._location)

    def with_location(self, place: Location) -> Self:
        self._location = place
        return self

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return [("owner", self.owner), *super().__repr_args__()]


class FunctionSchema(FrozenModel):
    """The `function` of an OpenAI tool schema."""

    name: str = Field(min_length=1)
    """Name that the policy uses."""
    description: str = ""
    """Description for the policy."""
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    """JSON Schema of the arguments, passed on unchanged."""
    strict: bool = False
    """Asks an OpenAI-like API to enforce the schema."""


class ToolSchema(FrozenModel):
    """An OpenAI tool schema."""

    type: Literal["function"] = "function"
    """Always `function`."""
    function: FunctionSchema
    """The OpenAI function schema."""


SandboxTool = Literal["python", "shell", "files"]
ImportPath = Annotated[str, Field(min_length=1, pattern=r"^[\w.]+(:[\w.]+|\.\w+)$")]
"""`package.module:name` or `package.module.name`; the folder of the file is importable."""


class Prepared(FrozenModel):
    """What the folder `/rollout` of a sandbox begins as."""

    state: Path | None = None
    """Folder or archive (tar, zip) that `/rollout` begins as a copy of; relative to the file."""
    states: Path | None = None
    """Folder of such folders and archives: a task's `state` names the one that it begins from instead."""
    state_ignore: tuple[str, ...] = ()
    """Patterns of files that do not count when the state at a rollout's end is compared, such as `*.log`."""


class Confinable(Prepared):
    """Whether a native tool runs in a sandbox."""

    isolation: Literal["none", "sandbox"] = "none"
    """`sandbox`: runs in a sandbox of the rollout, which its rewards do not leave; see `sandbox`."""
    sandbox: SandboxSettings = SandboxSettings()
    """What exists in the sandbox, and its limits."""

    @model_validator(mode="after")
    def _check_isolation(self) -> Self:
        if self.isolation == "none" and "sandbox" in self.model_fields_set:
            raise rule_error("`sandbox` belongs to `isolation: sandbox`", "write `isolation: sandbox`, or remove it")
        if self.isolation == "none" and (self.state or self.states):
            problem = "`state` and `states` belong to `isolation: sandbox`"
            raise rule_error(problem, "write `isolation: sandbox`, or remove them")
        check_is_local(self.sandbox)
        return self


class ClassEntry(Entry, Limits, Confinable):
    """A Python class as a tool, in verl's format; or an environment class in TRL's, whose methods are the tools."""

    class_name: ImportPath
    """The class, `package.module.Class`. One with `reset` and without `execute` is an environment class; so is what a
    function returns that is named here."""
    config: dict[str, Any] = {}
    """Passed to the class's constructor; verl's files mark this form with `type: native`."""
    tool_schema: ToolSchema | None = None
    """The tool's schema; a class may define its own instead."""
    description: str | None = None
    """Replaces the description of the schema."""
    prefix: str = ""
    """Goes before the tool's name."""

    @property
    def declared_name(self) -> str | None:
        return self.prefix + self.tool_schema.function.name if self.tool_schema else None


class FunctionEntry(Entry, Limits, Confinable):
    """A Python function as a tool; its schema is made from type hints and docstring."""

    function: ImportPath
    """The function, `package.module:name`."""
    name: str | None = Field(default=None, min_length=1)
    """The tool's name, if it differs from the function's."""
    description: str | None = None
    """Replaces the docstring."""
    parameters: dict[str, Any] | None = None
    """Replaces the JSON Schema made from the type hints."""
    prefix: str = ""
    """Goes before the tool's name."""
    run_in: Literal["thread", "process"] = "thread"
    """Where the function runs. `process`: in the main thread of a child process, as `signal.alarm` needs; it is killed,
    with all processes that it started, when the deadline passes."""

    @property
    def declared_name(self) -> str | None:
        return self.prefix + self.name if self.name else None


class SandboxToolsEntry(Entry, Limits, Prepared):
    """The shipped tools that work in a sandbox of the rollout: `python`, `shell` and `files`."""

    sandbox_tools: Annotated[tuple[SandboxTool, ...], Field(min_length=1)]
    """The tools to offer; they share one sandbox."""
    sandbox: SandboxSettings = SandboxSettings()
    """What exists in the sandbox, and its limits."""
    grade: GradeSettings | None = None
    """What gives the reward `grade`, after the `prefix`, at a rollout's end, from the files left in its sandbox."""
    warm: Annotated[int, Field(ge=0, le=256)] = 0
    """Sandboxes started in advance, each for one rollout, whose first call then does not wait for the start."""
    prefix: str = ""
    """Goes before the tools' names."""

    @model_validator(mode="after")
    def _check_grade(self) -> Self:
        if self.grade is not None:
            check_places(self.grade, self.sandbox)
        return self


class OfferEntry(Entry, Limits):
    """Which tools of an MCP server are offered, and with which limits; by default all, with the default limits."""

    allow: tuple[str, ...] | None = None
    """The tools to offer; all if left out."""
    prefix: str = ""
    """Prefix of each tool's name; `{server}` is replaced by the server's name."""
    parse: ImportPath | None = None
    """Class that parses results, derived from `gateway.mcp_client.parse_hook.MCPBaseTool`."""
    parse_tools: dict[str, ImportPath] = {}
    """Classes that parse results of single tools, by tool."""
    isolation: Isolation | None = None
    """Overrides the value in the servers file."""
    warm: Annotated[int, Field(ge=0)] | None = None
    """Overrides the value in the servers file."""
    most: PositiveInt | None = None
    """Overrides the value in the servers file."""
    idle_s: PositiveFloat | None = None
    """Overrides the value in the servers file."""
    connect_timeout_s: PositiveFloat | None = None
    """Overrides the value in the servers file."""
    result_values: PositiveInt | None = None
    """Overrides the value in the servers file."""
    result_bytes: PositiveInt | None = None
    """Overrides the value in the servers file."""
    on_clash: OnClash | None = None
    """Overrides the value in the servers file."""

    @property
    def selected(self) -> tuple[str, ...] | None:
        """The tools selected by name; None for all."""
        return self.allow

    @property
    def hook_config(self) -> Mapping[str, Any]:
        """Passed to the constructor of the parse hook."""
        return {}

    def selects(self, server: str, tool: str) -> bool:
        """Whether this entry selects the tool by name, as `tool` or `server_tool`."""
        return self.selected is not None and (tool in self.selected or f"{server}_{tool}" in self.selected)

    def hook_for(self, tool: str) -> str | None:
        """The class that parses the tool's results; None for the default."""
        return self.parse_tools.get(tool, self.parse)

    def prefix_for(self, server: str) -> str:
        return self.prefix.replace("{server}", server)


class McpConfig(FrozenModel):
    """verl's settings of an MCP tool; further keys are for the parse hook."""

    model_config = ConfigDict(extra="allow")

    type: Literal["mcp"] = "mcp"
    """Marks this form in verl's files."""
    rate_limit: PositiveFloat | None = None
    """verl's name for `rate_per_s`, which takes precedence."""
    timeout: PositiveFloat | None = None
    """verl's name for `timeout_s`, which takes precedence."""


class Mcp(FrozenModel):
    """The `mcp` section of an entry in verl's format."""

    mcp_servers_config_path: str = Field(min_length=1)
    """Path of a servers file, relative to this file's folder or, if it isn't there, to the working folder."""
    tool_selected_list: Annotated[
        tuple[str, ...] | None,
        # verl's documentation uses `{}` for all tools.
        BeforeValidator(lambda value: value or None, json_schema_input_type=tuple[str, ...] | dict[str, Any] | None),
    ] = None
    """The tools to offer, as `tool` or `server_tool`; all if left out or empty."""


class McpEntry(OfferEntry):
    """All servers of a servers file, in verl's format."""

    mcp: Mcp
    """The servers file and the tools to offer."""
    class_name: ImportPath | Literal[""] = ""
    """Class that parses results, derived from `MCPBaseTool`; empty for the default."""
    config: McpConfig = McpConfig()
    """verl's settings of an MCP tool."""

    @property
    def selected(self) -> tuple[str, ...] | None:
        return self.mcp.tool_selected_list if self.allow is None else self.allow

    @property
    def hook_config(self) -> Mapping[str, Any]:
        return self.config.model_dump(exclude_none=True)

    def hook_for(self, tool: str) -> str | None:
        return super().hook_for(tool) or self.class_name or None

    def with_verl_limits(self) -> Self:
        """The entry with verl's timeout and rate limit, unless `timeout_s` or `rate_per_s` is given."""
        theirs = {"timeout_s": self.config.timeout, "rate_per_s": self.config.rate_limit}
        update = {name: value for name, value in theirs.items() if value and name not in self.model_fields_set}
        return self.model_copy(update=update)

    @model_validator(mode="after")
    def _check_duplicates(self) -> Self:
        if self.allow is not None and self.mcp.tool_selected_list is not None:
            raise rule_error("`allow` and `tool_selected_list` both select tools", "remove one of them")
        if self.parse is not None and self.class_name:
            raise rule_error("`parse` and `class_name` both name a parse hook", "remove one of them")
        return self


class ServerToolsEntry(OfferEntry):
    """The tools of one server in the servers file."""

    server: str = Field(min_length=1)
    """Name of the server in the servers file."""


class InteractionEntry(Entry):
    """A feedback interaction, in verl's format."""

    name: str = ""
    """Name by which a session selects it; by default made from the class (`Gsm8kInteraction` becomes `gsm8k`)."""
    class_name: ImportPath
    """The class, `package.module.Class`."""
    config: dict[str, Any] = {}
    """Passed to the class's constructor, with `name` added."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of one turn."""
    media: MediaLimits = MediaLimits()
    """Limits on images, audio and video in its feedback."""

    @property
    def offered_name(self) -> str:
        return self.name or interaction_name(self.class_name)


def interaction_name(class_name: str) -> str:
    """The default name of an interaction: `gsm8k` for `Gsm8kInteraction` or its full path."""
    last = class_name.replace(":", ".").rpartition(".")[2]
    return (last.removesuffix("Interaction") or last).lower()
