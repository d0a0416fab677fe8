"""From a configuration to sources: every entry of the files becomes a toolset under its limits and its names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

from gateway.config.entries import ClassEntry, FunctionEntry, Offer
from gateway.config.find import find
from gateway.config.load import Config, load
from gateway.config.models import Limits, ResultLimit
from gateway.config.servers import ServerEntry
from gateway.cut import cutter
from gateway.errors import ConfigError, ConfigErrors, told
from gateway.feedback.entry import Declared
from gateway.feedback.toolset import FeedbackToolset
from gateway.limit import Breaker, Limited
from gateway.media.admit import Store
from gateway.native.base import BaseTool, OpenAIFunctionToolSchema
from gateway.native.function import FunctionTool
from gateway.native.toolset import ClassTool, NativeTool, NativeToolset
from gateway.table import Source
from gateway.toolset import Renamed, Toolset, prefix
from gateway.types import ToolSpec
from gateway.upstream.hook import uncalled
from gateway.upstream.server import McpToolset
from gateway.upstream.services import Services
from gateway.upstream.session import Reading

Native = ClassEntry | FunctionEntry
Places = Path | str | Sequence[Path | str] | None
"""A folder of YAML, a file, or several of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    config: Config
    sources: tuple[Source, ...]
    services: Services


def plan(
    tools: Places,
    servers: Path | str | None,
    services: Services | None = None,
    result_limit: ResultLimit | None = None,
) -> Plan:
    """What the files ask for; with the services of a running gateway, what it should become."""
    env = {"MTRL_PYTHON": sys.executable, **os.environ}
    places = [tools] if isinstance(tools, Path | str) else tools or ()
    config = load([Path(place) for place in places], Path(servers) if servers else None, env, result_limit)
    services = services or Services()
    return Plan(config, tuple(sources(config, services)), services)


def sources(config: Config, services: Services) -> Iterator[Source]:
    """Native tools with the same limits share a source, so that a session holds few things."""
    store = Store()
    mistakes: list[ConfigError] = []
    tools = [(entry, tool) for entry in config.tools if (tool := _tried(_native, entry, mistakes)) is not None]
    offers = {offer.owner: offer for server in config.servers.values() for offer in server.offers}
    mistakes += [error for entry in (*config.tools, *offers.values()) if (error := _uncuttable(entry)) is not None]
    if mistakes:
        raise ConfigErrors(mistakes)
    for shared, group in groupby(sorted(tools, key=_shared), key=_shared):
        members = list(group)
        limits = _limits(members[0][0])
        toolset: Toolset = NativeToolset([tool for _, tool in members])
        if members[0][0].prefix:
            toolset = prefix(toolset, members[0][0].prefix)
        limited = Limited(toolset, limits, store=store)
        yield Source(_key(shared, *(entry for entry, _ in members)), limited, admit=None)
    for server in config.servers.values():
        yield _server(server, services, store)
    if config.interactions:
        yield _feedback(config, store)


def _tried(make: Callable[[Native], NativeTool], entry: Native, mistakes: list[ConfigError]) -> NativeTool | None:
    try:
        return make(entry)
    except ConfigErrors as errors:
        mistakes.extend(errors.errors)
    except ConfigError as error:
        mistakes.append(error)
    except Exception as error:  # boundary: an operator's code may raise anything over its configuration
        problem = f"the tool cannot be made: {told(error)}"
        mistakes.append(ConfigError(problem, file=entry.file, field=entry.field))
    return None


def _uncuttable(entry: Native | Offer) -> ConfigError | None:
    """A tokenizer that cannot be had is a mistake of the file, and not of the first call."""
    try:
        cutter(entry.result_limit)
    except ConfigError as error:
        return ConfigError(error.problem, file=entry.file, field=f"{entry.field}.{error.field}", remedy=error.remedy)
    return None


def _native(entry: Native) -> NativeTool:
    if isinstance(entry, FunctionEntry):
        function = find(entry.function, entry.file, f"{entry.field}.function")
        return FunctionTool(
            function,
            name=entry.name,
            description=entry.description,
            parameters=entry.parameters,
            owner=entry.owner,
        )
    made = ClassTool(class_tool(entry), owner=entry.owner)
    if entry.tool_schema is not None:
        # A class may have read the schema through a model of its own that keeps less; the file's word is whole.
        function = entry.tool_schema.function
        description = function.description if entry.description is None else entry.description
        made.spec = ToolSpec(function.name, description, function.parameters, owner=entry.owner)
    return made


def class_tool(entry: ClassEntry) -> BaseTool:
    """The object of a class that a file names."""
    kind = find(entry.class_name, entry.file, f"{entry.field}.class_name")
    tool: BaseTool = kind(entry.config, _schema(entry))
    return tool


def _schema(entry: ClassEntry) -> OpenAIFunctionToolSchema | None:
    if entry.tool_schema is None:
        return None
    return OpenAIFunctionToolSchema.model_validate(entry.tool_schema.model_dump())


def _server(entry: ServerEntry, services: Services, store: Store) -> Source:
    """One connection's worth of tools; each tool under the limits of the entry that offers it."""
    leaf = McpToolset(entry.name, entry.server, services=services, parse=_readings(entry))
    breaker = Breaker() if entry.server.isolation == "shared" else None
    limited = Limited(leaf, lambda name: _offered_limits(entry, name), breaker, store)
    renamed = Renamed(limited, lambda spec: _offered(entry, spec))
    return Source(_key("server", entry), renamed, leaf, ours=False, admit=None)


def _readings(entry: ServerEntry) -> dict[str, Reading]:
    """Who reads the results of which tool; `*` is every tool that nobody names."""
    readings: dict[str, Reading] = {}
    for offer in entry.offers:
        named = ("*",) if offer.selected is None else offer.selected
        for tool in (*named, *offer.parse_tools):
            if hook := offer.hook(tool):
                made = partial(_hook(hook, offer), dict(offer.settings))
                readings[tool.removeprefix(f"{entry.name}_")] = readings[tool] = made
    return readings


def _hook(name: str, offer: Offer) -> Any:
    kind = find(name, offer.file, offer.field)
    if idle := uncalled(kind):
        problem = f"{name} defines {', '.join(idle)}, which nobody would call: the gateway itself calls MCP tools"
        remedy = "override `_parse_tool_result`, or `parse_result`, which sees the whole result and may reward it"
        raise ConfigError(problem, file=offer.file, field=offer.field, remedy=remedy)
    return kind


def _offered(entry: ServerEntry, spec: ToolSpec) -> str | None:
    offer = entry.offer(spec.name)
    return None if offer is None else offer.prefix_for(entry.name) + spec.name


def _offered_limits(entry: ServerEntry, name: str) -> Limits:
    offer = entry.offer(name)
    return Limits() if offer is None else _limits(offer)


def _limits(entry: Limits) -> Limits:
    """The limits of an entry, without all else that it says."""
    return Limits.model_validate({name: getattr(entry, name) for name in Limits.model_fields})


def _feedback(config: Config, store: Store) -> Source:
    entries = [
        Declared(
            find(entry.class_name, entry.file, f"{entry.field}.class_name"),
            entry.config,
            entry.name,
            entry.owner,
            entry.timeout_s,
            entry.media,
        )
        for entry in config.interactions
    ]
    toolset = FeedbackToolset.from_entries(entries, store)
    return Source(_key("feedback", *config.interactions), toolset, admit=None)


def _shared(made: tuple[Native, NativeTool]) -> str:
    entry = made[0]
    return f"native {entry.prefix} {_limits(entry).model_dump_json()}"


def _key(kind: str, *entries: BaseModel) -> str:
    """Equal for equal configuration, secrets included; a hash, so that it may be logged."""
    told = json.dumps([entry.model_dump() for entry in entries], default=_told, sort_keys=True)
    return f"{kind.split()[0]}:{sha256(f'{kind}{told}'.encode()).hexdigest()[:16]}"


def _told(value: Any) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)
