"""Builds the gateway's sources from its configuration files: a toolset with limits and names for every entry."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from gateway.config.configured_server import ConfiguredServer
from gateway.config.diagnostics import closest_match
from gateway.config.entries import ClassEntry, FunctionEntry, OfferEntry, SandboxToolsEntry
from gateway.config.load import Config, load_config
from gateway.config.load_object import load_object
from gateway.config.models import Instructions, Limits, ResultLimit
from gateway.errors import ConfigError, ConfigErrors, describe_exception
from gateway.feedback.code import CodeInteraction
from gateway.feedback.interaction_toolset import FeedbackToolset, build_interactions
from gateway.limits import CircuitBreaker, LimitedToolset
from gateway.mcp_client.mcp_session import ResultParser
from gateway.mcp_client.mcp_toolset import McpToolset
from gateway.mcp_client.parse_hook import unused_methods
from gateway.mcp_client.transport import Services
from gateway.media.media_filter import MediaFilter, MediaStore
from gateway.native.agent_data import BASE_CLASS_MODULES
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.class_environment import ClassEnvironment, ClassEnvironmentToolset, is_environment
from gateway.native.function import FunctionPath, FunctionTool
from gateway.native.native_toolset import ClassTool, NativeTool, NativeToolset
from gateway.native.sandboxed_toolset import SandboxedTool, SandboxedToolset, module_path
from gateway.sandbox.choose_provider import choose_provider
from gateway.sandbox.grade_settings import resolve_grade
from gateway.sandbox.grader import Grader
from gateway.sandbox.roots import find_root
from gateway.sandbox.sandbox_paths import resolve_paths
from gateway.sandbox.sandbox_settings import SandboxSettings
from gateway.sandbox.sandbox_state import SandboxStates
from gateway.sandbox.sandbox_toolset import GRADE, SandboxToolset
from gateway.state.prepared_state import PreparedStates, is_prepared_state
from gateway.tool_table import Source
from gateway.toolset import RenamedToolset, Toolset, add_prefix
from gateway.truncate import make_truncator
from gateway.types import ToolSpec
from gateway.user_code import UserCode

NativeEntry = ClassEntry | FunctionEntry
FUNCTION_REMEDY = "name a function whose parameters have names and type hints, and which returns what the policy reads"
CLASS_REMEDY = (
    "derive it from `gateway.native.base:BaseTool`, made with `config` and `tool_schema`, and define `async def"
    " execute(self, instance_id, parameters, **kwargs)`; a class with `reset` offers its methods as tools"
)
ToolFiles = Path | str | Sequence[Path | str] | None
"""A folder of YAML files, a file, or several of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A configuration with the sources built from it."""

    config: Config
    sources: tuple[Source, ...]
    services: Services


def build_plan(
    tools: ToolFiles,
    servers: Path | str | None,
    services: Services | None = None,
    result_limit: ResultLimit | None = None,
    instructions: Instructions | None = None,
) -> Plan:
    """Reads the files and builds the sources; for a reload, pass the services of the running gateway."""
    env = {"MTRL_PYTHON": sys.executable, **os.environ}
    paths = [tools] if isinstance(tools, Path | str) else tools or ()
    config = load_config(
        [Path(path) for path in paths], Path(servers) if servers else None, env, result_limit, instructions
    )
    services = services or Services()
    return Plan(config, tuple(build_sources(config, services)), services)


def build_sources(config: Config, services: Services) -> Iterator[Source]:
    """Builds the sources. Native tools with the same limits share one, so that a session opens few of them."""
    store = MediaStore()
    errors: list[ConfigError] = []
    tools = [(entry, tool) for entry in config.tools if (tool := _try_build(entry, errors)) is not None]
    offers = {offer.owner: offer for server in config.servers.values() for offer in server.offers}
    errors += [
        error for entry in (*config.tools, *offers.values()) if (error := _check_result_limit(entry)) is not None
    ]
    errors += _find_shared_grades(config.sandbox_tools)
    if errors:
        raise ConfigErrors(errors)
    shared_tools: list[tuple[NativeEntry, NativeTool]] = []
    for entry, tool in tools:
        if isinstance(tool, ClassEnvironment):
            yield _build_environment_source(entry, tool, store)
        elif entry.isolation == "sandbox":
            yield _build_sandboxed_source(entry, tool, services, store)
        else:
            shared_tools.append((entry, tool))
    for shared, group in groupby(sorted(shared_tools, key=_sharing_key), key=_sharing_key):
        members = list(group)
        native = NativeToolset([tool for _, tool in members])
        limited = _limited(native, members[0][0], store)
        yield Source(_source_key(shared, *(entry for entry, _ in members)), limited, native, admit=None)
    for box in config.sandbox_tools:
        yield _build_sandbox_source(box, services, store)
    for server in config.servers.values():
        yield _build_server_source(server, services, store)
    if config.interactions:
        yield _build_feedback_source(config, services, store)


def _limited(inner: Toolset, entry: SandboxToolsEntry | NativeEntry, store: MediaStore) -> LimitedToolset:
    """A toolset with the prefix and the limits of its entry."""
    prefixed = add_prefix(inner, entry.prefix) if entry.prefix else inner
    return LimitedToolset(prefixed, _limits_of_entry(entry), store=store)


def _find_shared_grades(entries: Iterable[SandboxToolsEntry]) -> Iterator[ConfigError]:
    """Grades that have the name of another one."""
    graded: dict[str, SandboxToolsEntry] = {}
    for entry in entries:
        if entry.grade is not None and (other := graded.setdefault(entry.prefix, entry)) is not entry:
            problem = f"{other.file}: {other.field} has a grade with the same name, `{entry.prefix}{GRADE}`"
            remedy = "give one of the entries another `prefix`"
            yield ConfigError(problem, file=entry.file, field=f"{entry.field}.grade", remedy=remedy)


def _try_build(entry: NativeEntry, errors: list[ConfigError]) -> NativeTool | ClassEnvironment | None:
    try:
        with UserCode():
            return _build_native_tool(entry)
    except ConfigErrors as error:
        errors.extend(error.errors)
    except ConfigError as error:
        errors.append(error)
    except Exception as error:  # boundary: an operator's class may raise anything in its constructor
        problem = f"creating the tool failed: {describe_exception(error)}"
        remedy = CLASS_REMEDY if isinstance(entry, ClassEntry) else FUNCTION_REMEDY
        errors.append(ConfigError(problem, file=entry.file, field=entry.field, remedy=remedy))
    return None


def _check_result_limit(entry: NativeEntry | OfferEntry) -> ConfigError | None:
    """Reports a missing tokenizer when the files are read, rather than at the first call."""
    try:
        make_truncator(entry.result_limit)
    except ConfigError as error:
        return ConfigError(error.problem, file=entry.file, field=f"{entry.field}.{error.field}", remedy=error.remedy)
    return None


def _build_native_tool(entry: NativeEntry) -> NativeTool | ClassEnvironment:
    if isinstance(entry, FunctionEntry):
        function = load_object(entry.function, entry.file, f"{entry.field}.function")
        tool = FunctionTool(
            function,
            name=entry.name,
            description=entry.description,
            parameters=entry.parameters,
            owner=entry.owner,
        )
        bare = [
            name for name, schema in tool.spec.parameters.get("properties", {}).items() if not {*schema} - {"default"}
        ]
        if bare and not tool.spec.description:
            problem = f"has no docstring and no type hint of `{bare[0]}`: the policy would see names only"
            remedy = "write both, or give the entry a `description` and `parameters`"
            raise ConfigError(problem, file=entry.file, field=f"{entry.field}.function", remedy=remedy)
        if entry.run_in == "process":
            tool.process = FunctionPath(entry.function, entry.file)
        field = "isolation" if entry.isolation == "sandbox" else "run_in" if tool.process is not None else ""
        if field and tool.context_parameter is not None:
            problem = f"`{tool.context_parameter}` is the rollout's context, which another process cannot use"
            remedy = f"remove the parameter, or `{field}: {getattr(entry, field)}`"
            raise ConfigError(problem, file=entry.file, field=f"{entry.field}.{field}", remedy=remedy)
        return tool
    cls = load_object(entry.class_name, entry.file, f"{entry.field}.class_name")
    if is_environment(cls):
        return _build_class_environment(entry, cls)
    class_tool = ClassTool(build_class_tool(entry), owner=entry.owner)
    if entry.isolation == "sandbox" and getattr(type(class_tool.tool), "calc_reward", None) is not BaseTool.calc_reward:
        problem = "its `calc_reward` would be within reach of what it scores, inside the sandbox"
        remedy = "score with a reward function or an interaction, and remove `calc_reward`"
        raise ConfigError(problem, file=entry.file, field=f"{entry.field}.isolation", remedy=remedy)
    if entry.tool_schema is not None:
        # A class may have parsed the schema with a model that drops keys, so the file's version is used.
        function = entry.tool_schema.function
        description = function.description if entry.description is None else entry.description
        class_tool.spec = ToolSpec(function.name, description, function.parameters, owner=entry.owner)
    return class_tool


def _build_class_environment(entry: ClassEntry, make: Callable[..., Any]) -> ClassEnvironment:
    """An environment class or a function that makes its objects, whose methods are several tools."""
    given = [name for name in ("tool_schema", "description") if getattr(entry, name) is not None]
    if given or entry.isolation == "sandbox":
        problem = "does not apply to an environment class, whose methods are the tools"
        remedy = "remove it; type hints and docstrings of the methods describe them"
        raise ConfigError(problem, file=entry.file, field=f"{entry.field}.{(*given, 'isolation')[0]}", remedy=remedy)
    config = {name: value for name, value in entry.config.items() if (name, value) != ("type", "native")}  # verl's mark
    try:
        return ClassEnvironment(make, config, entry.owner)
    except ConfigError as error:
        field = f"{entry.field}.class_name"
        problem = ": ".join(filter(None, (error.field, error.problem)))
        raise ConfigError(problem, file=entry.file, field=field, remedy=error.remedy) from error


def build_class_tool(entry: ClassEntry) -> BaseTool:
    """Loads the tool class that an entry names, and creates its object."""
    field = f"{entry.field}.class_name"
    cls = load_object(entry.class_name, entry.file, field)
    execute = getattr(cls, "execute", None)
    if execute is None or execute.__module__ in (BaseTool.__module__, *BASE_CLASS_MODULES):
        near = closest_match("execute", {name for name in dir(cls) if not name.startswith("_")} - {*dir(BaseTool)})
        if near or execute in (None, BaseTool.execute):  # Without one, every call of verl's base class succeeds.
            remedy = f"did you mean it by `{near}`?" if near else CLASS_REMEDY
            raise ConfigError("the class has no `execute`", file=entry.file, field=field, remedy=remedy)
    schema = entry.tool_schema and OpenAIFunctionToolSchema.model_validate(entry.tool_schema.model_dump())
    tool: BaseTool = cls(entry.config, schema)
    return tool


def _build_environment_source(entry: NativeEntry, environment: ClassEnvironment, store: MediaStore) -> Source:
    """An environment class; the calls of one message change the same object, in their order."""
    inner = ClassEnvironmentToolset(environment)
    limited = _limited(inner, entry, store)
    return Source(_source_key("environment", entry), limited, inner, admit=None, in_order=True)


def _build_sandboxed_source(entry: NativeEntry, tool: NativeTool, services: Services, store: MediaStore) -> Source:
    """A native tool that runs in a sandbox."""
    name = entry.function if isinstance(entry, FunctionEntry) else entry.class_name
    path = module_path(name.partition(":")[0] if ":" in name else name.rpartition(".")[0])
    schema = entry.tool_schema if isinstance(entry, ClassEntry) else None
    start = {
        "object": name,
        "is_class": isinstance(entry, ClassEntry),
        "name": tool.spec.name,
        "path": [str(path.parent)],
        "config": entry.config if isinstance(entry, ClassEntry) else {},
        "schema": schema and schema.model_dump(),
    }
    folder = entry.file.resolve().parent
    states = SandboxStates(_prepared_states(entry, folder), services.reaper) if entry.state or entry.states else None
    made = SandboxedTool(tool.spec, start, _sandbox_settings(entry), (str(path),), states)
    inner = SandboxedToolset([made], services.reaper)
    limited = _limited(inner, entry, store)
    name = f"{entry.prefix}{tool.spec.name}"
    return Source(_source_key("sandboxed", entry), limited, inner, admit=None, sandbox_name=name)


def _build_sandbox_source(entry: SandboxToolsEntry, services: Services, store: MediaStore) -> Source:
    """The shipped tools of one entry, which share a sandbox for each rollout."""
    folder = entry.file.resolve().parent
    settings = _sandbox_settings(entry)
    if settings.root and (settings.provider is None or settings.provider.is_local):
        try:
            find_root(settings.root)
        except ConfigError as error:
            field = f"{entry.field}.sandbox.root"
            raise ConfigError(error.problem, file=entry.file, field=field, remedy=error.remedy) from error
    provider = choose_provider(settings, services.reaper)
    inner = SandboxToolset(entry.sandbox_tools, settings, provider, entry.owner)
    inner.warm = entry.warm
    if entry.grade is not None:
        grade = resolve_grade(entry.grade, folder, entry.file, f"{entry.field}.grade")
        inner.grader = Grader(grade, settings, provider)
        inner.reward = f"{entry.prefix}{GRADE}"
    inner.states = SandboxStates(_prepared_states(entry, folder), services.reaper)
    limited = _limited(inner, entry, store)
    name = f"{entry.prefix}sandbox"
    return Source(_source_key("sandbox", entry), limited, inner, admit=None, sandbox_name=name)


def _sandbox_settings(entry: SandboxToolsEntry | NativeEntry) -> SandboxSettings:
    """The settings of an entry's sandbox, with absolute paths; raises ConfigError."""
    return resolve_paths(entry.file.resolve().parent, entry.sandbox, entry.file, f"{entry.field}.sandbox")


def _prepared_states(entry: SandboxToolsEntry | NativeEntry, folder: Path) -> PreparedStates:
    """The prepared states of an entry; raises ConfigError for one that is not there."""
    paths = {
        name: path and folder / path.expanduser() for name in ("state", "states") if (path := getattr(entry, name))
    }
    for name, path in paths.items():
        if not (is_prepared_state(path) if name == "state" else path.is_dir()):
            remedy = "create it, or correct the path; archives end in .tar, .tar.gz or .zip"
            raise ConfigError("there is no such folder", file=entry.file, field=f"{entry.field}.{name}", remedy=remedy)
    return PreparedStates(paths.get("state"), paths.get("states"), entry.state_ignore)


def _build_server_source(entry: ConfiguredServer, services: Services, store: MediaStore) -> Source:
    """The tools of one MCP server, each with the limits of the entry that offers it."""
    toolset = McpToolset(entry.name, entry.server, services=services, parse=_parse_hooks(entry))
    breaker = CircuitBreaker() if entry.server.isolation == "shared" else None
    limited = LimitedToolset(toolset, lambda name: _limits_of_tool(entry, name), breaker, store)
    renamed = RenamedToolset(limited, lambda spec: _offered_name(entry, spec))
    return Source(
        _source_key("server", entry),
        renamed,
        toolset,
        trusted=False,
        admit=None,
        name=entry.name,
        on_clash=entry.server.on_clash,
        answers=toolset.answers,
    )


def _parse_hooks(entry: ConfiguredServer) -> dict[str, ResultParser]:
    """The parse hook of each tool; `*` is for all tools without one of their own."""
    readings: dict[str, ResultParser] = {}
    for offer in entry.offers:
        tools = ("*",) if offer.selected is None else offer.selected
        for tool in (*tools, *offer.parse_tools):
            if hook := offer.hook_for(tool):
                make_hook = partial(_load_parse_hook(hook, offer), dict(offer.hook_config))
                readings[tool.removeprefix(f"{entry.name}_")] = readings[tool] = make_hook
    return readings


def _load_parse_hook(name: str, offer: OfferEntry) -> Any:
    hook = load_object(name, offer.file, offer.field)
    if uncalled_methods := unused_methods(hook):
        methods = ", ".join(uncalled_methods)
        problem = f"{name} defines {methods}, which are never called, because the gateway itself calls MCP tools"
        remedy = "override `_parse_tool_result`, or `parse_result`, which gets the entire result and may set a reward"
        raise ConfigError(problem, file=offer.file, field=offer.field, remedy=remedy)
    return hook


def _offered_name(entry: ConfiguredServer, spec: ToolSpec) -> str | None:
    offer = entry.offer(spec.name)
    return None if offer is None else offer.prefix_for(entry.name) + spec.name


def _limits_of_tool(entry: ConfiguredServer, name: str) -> Limits:
    offer = entry.offer(name)
    return Limits() if offer is None else _limits_of_entry(offer)


def _limits_of_entry(entry: Limits) -> Limits:
    """Only the limits of an entry."""
    return Limits.model_validate({name: getattr(entry, name) for name in Limits.model_fields})


def _build_feedback_source(config: Config, services: Services, store: MediaStore) -> Source:
    toolset = FeedbackToolset(
        build_interactions(config.interactions),
        timeouts_s={entry.name: entry.timeout_s for entry in config.interactions},
        owners={entry.name: entry.owner for entry in config.interactions},
        media_filters={entry.name: MediaFilter(entry.media, store) for entry in config.interactions},
    )
    for interaction in toolset.interactions.values():
        if isinstance(interaction, CodeInteraction):
            interaction.reaper = services.reaper
    return Source(_source_key("feedback", *config.interactions), toolset, admit=None)


def _sharing_key(pair: tuple[NativeEntry, NativeTool]) -> str:
    entry = pair[0]
    return f"native {entry.prefix} {_limits_of_entry(entry).model_dump_json()}"


def _source_key(kind: str, *entries: BaseModel) -> str:
    """Equal for equal configuration, including secrets; hashed, so that it can be logged."""
    config = json.dumps([entry.model_dump() for entry in entries], default=_reveal_secret, sort_keys=True)
    return f"{kind.split()[0]}:{sha256(f'{kind}{config}'.encode()).hexdigest()[:16]}"


def _reveal_secret(value: Any) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
