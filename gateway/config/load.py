"""Loads all configuration files into a `Config`, and reports all their errors at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.config.base import FrozenModel
from gateway.config.configured_server import ConfiguredServer, apply_offers
from gateway.config.diagnostics import closest_match, explain_validation_error
from gateway.config.entries import (
    ClassEntry,
    Entry,
    FunctionEntry,
    InteractionEntry,
    Location,
    McpEntry,
    OfferEntry,
    SandboxToolsEntry,
    ServerToolsEntry,
    display_path,
)
from gateway.config.environment import Expansion, format_loc
from gateway.config.file_forms import ServerSection, ServersFile, ToolsFile
from gateway.config.models import Instructions, Limits, ResultLimit, Server
from gateway.config.reader import read_file
from gateway.config.rollout_variables import find_rollout_problem
from gateway.config.server_paths import resolve_server
from gateway.config.translated_file import TranslatedFile
from gateway.errors import ConfigError, ConfigErrors
from gateway.plugins import installed_plugins, load_name

File = TypeVar("File", bound=FrozenModel)
E = TypeVar("E", bound=Entry)
L = TypeVar("L", bound=Limits)

RUN_FILE_KEYS = frozenset(
    {"model", "data", "reward", "algorithm", "update", "steps", "prompts", "n", "limits", "system"}
)
"""Keys of a trainer's run file that no other file has."""


class Config(FrozenModel):
    """The configuration from all files."""

    tools: tuple[ClassEntry | FunctionEntry, ...] = ()
    """The native tools."""
    sandbox_tools: tuple[SandboxToolsEntry, ...] = ()
    """The entries of tools that work in a sandbox."""
    interactions: tuple[InteractionEntry, ...] = ()
    """The feedback interactions, with unique names."""
    servers: dict[str, ConfiguredServer] = {}
    """The MCP servers by name, each with the entries that offer its tools."""
    files: tuple[Path, ...] = ()
    """Every file that was read."""
    notes: tuple[str, ...] = ()
    """Keys of other clients that were ignored or interpreted, with file and line."""


def load_config(
    tools: Path | Sequence[Path] | None,
    servers: Path | None,
    env: Mapping[str, str] = os.environ,
    result_limit: ResultLimit | None = None,
    instructions: Instructions | None = None,
) -> Config:
    """Loads folders of YAML files (or single files) and a servers file; raises `ConfigErrors` with all errors.

    `result_limit` and `instructions` apply to each entry and server without its own.
    """
    loader = _ConfigLoader(env)
    paths = [tools] if isinstance(tools, Path) else tools or ()
    files = dict.fromkeys(file for place in paths for file in loader.tool_files(place))
    tools_files = [(file, model) for file in files if (model := loader.read_model(file, ToolsFile))]
    natives: list[ClassEntry | FunctionEntry] = []
    boxes: list[SandboxToolsEntry] = []
    offers: list[McpEntry | ServerToolsEntry] = []
    interactions: list[InteractionEntry] = []
    for file, model in tools_files:
        for entry in _with_locations(model.tools, display_path(file), "tools"):
            if isinstance(entry, McpEntry | ServerToolsEntry):
                offers.append(entry)
            elif isinstance(entry, SandboxToolsEntry):
                boxes.append(entry)
            else:
                natives.append(entry)
        interactions += _with_locations(model.interaction, display_path(file), "interaction")
    loader.check_unique(
        natives, lambda entry: entry.declared_name, "tools", "give one of them another name or a `prefix`"
    )
    loader.check_unique(
        interactions, lambda entry: entry.offered_name, "interactions", "give one of them another `name`"
    )
    found_servers = loader.resolve_servers(servers, offers)
    if instructions is not None:
        found_servers = {name: _with_instructions(entry, instructions) for name, entry in found_servers.items()}
    if loader.errors:
        raise ConfigErrors(loader.errors)
    return Config(
        tools=tuple(_with_default_limit(entry, result_limit) for entry in natives),
        sandbox_tools=tuple(_with_default_limit(entry, result_limit) for entry in boxes),
        interactions=tuple(entry.model_copy(update={"name": entry.offered_name}) for entry in interactions),
        servers={name: _with_default_limits(entry, result_limit) for name, entry in found_servers.items()},
        files=tuple(loader.files),
        notes=tuple(dict.fromkeys(loader.notes)),
    )


def _with_locations(entries: Iterable[E], file: Path, field: str) -> Iterator[E]:
    for index, entry in enumerate(entries):
        yield entry.with_location(Location(file, f"{field}[{index}]"))


def _with_default_limit(entry: L, limit: ResultLimit | None) -> L:
    return entry if limit is None or entry.result_limit else entry.model_copy(update={"result_limit": limit})


def _with_default_limits(entry: ConfiguredServer, limit: ResultLimit | None) -> ConfiguredServer:
    return entry.model_copy(update={"offers": tuple(_with_default_limit(offer, limit) for offer in entry.offers)})


def _with_instructions(entry: ConfiguredServer, instructions: Instructions) -> ConfiguredServer:
    if "instructions" in entry.server.model_fields_set:
        return entry
    return entry.model_copy(update={"server": entry.server.model_copy(update={"instructions": instructions})})


def _translate_file(raw: Any, file: Path) -> TranslatedFile:
    """A servers file in our form, if it is another client's."""
    translated = TranslatedFile(raw)
    for plugin in installed_plugins():
        for name in plugin.servers_files:
            translated = load_name(name)(translated.tree, file)
    return translated


def _require_kind(raw: Any, file: Path, model: type[FrozenModel]) -> None:
    """Raises ConfigError for a file of another kind: otherwise each of its keys would be an error."""
    keys = set(raw) if isinstance(raw, Mapping) else set()
    is_servers = bool(keys & {"mcpServers", "servers"}) and "tools" not in keys
    if model is ToolsFile and is_servers:
        problem, remedy = "is a file of MCP servers, not of tools", "name it with --mcp (`mcp` in a run file)"
    elif model is ServersFile and keys and keys <= {"tools", "interaction"}:
        problem, remedy = "is a file of tools, not of MCP servers", "name it with --tools (`tools` in a run file)"
    elif not is_servers and len(keys & RUN_FILE_KEYS) > 1:
        kind = "tools" if model is ToolsFile else "MCP servers"
        problem, remedy = f"is a run file, not a file of {kind}", "name it with `mtrl-train --config`"
    else:
        return
    raise ConfigError(problem, file=display_path(file), remedy=remedy)


class _ConfigLoader:
    """Reads all files and collects their errors."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.errors: list[ConfigError] = []
        self.files: list[Path] = []
        self.notes: list[str] = []
        self.known: dict[str, ConfiguredServer] = {}
        self.disabled: set[str] = set()
        self.by_file: dict[Path, list[str]] = {}
        self.is_complete = True
        """Whether every servers file could be read, so that an unknown server is an error."""

    def tool_files(self, tools: Path) -> list[Path]:
        if tools.is_file():
            return [tools.resolve()]
        if not tools.is_dir():
            kind = "file" if tools.suffix in (".yaml", ".yml") else "folder"
            remedy = f"create the {kind}, or name another with --tools"
            self.errors.append(ConfigError(f"there is no such {kind}", file=display_path(tools), remedy=remedy))
            return []
        files = (file for file in tools.resolve().iterdir() if file.suffix in (".yaml", ".yml"))
        return sorted(file for file in files if not file.name.startswith("."))

    def read_model(self, file: Path, model: type[File]) -> File | None:
        self.files.append(file)
        expansion = Expansion(self.env, display_path(file))
        try:
            raw = {} if (read := read_file(file)) is None else read
            _require_kind(raw, file, model)
            if model is ServersFile:
                translated = _translate_file(raw, file)
                expansion.suggest_key = translated.suggest_key
                self.notes += [" ".join(str(note).split()) for note in translated.notes]
                raw, expansion.questions = translated.tree, translated.inputs
                expansion.location_in_file = translated.location_in_file
            tree = expansion.expand_tree(raw)
            self.errors += expansion.errors.values()
            return model.model_validate(tree)
        except ConfigError as error:
            self.errors.append(error)
        except ValidationError as error:
            self.errors += explain_validation_error(error, tree, file, expansion)
        return None

    def check_unique(self, entries: Iterable[E], name: Callable[[E], str | None], kind: str, remedy: str) -> None:
        owners: dict[str, str] = {}
        for entry in entries:
            if (key := name(entry)) is None:
                continue
            if key in owners:
                problem = f"two {kind} are named {key!r}: one of {owners[key]}, one of {entry.owner}"
                self.errors.append(ConfigError(problem, file=entry.file, field=entry.field, remedy=remedy))
            owners.setdefault(key, entry.owner)

    def resolve_servers(
        self, main: Path | None, offers: Iterable[McpEntry | ServerToolsEntry]
    ) -> dict[str, ConfiguredServer]:
        if main is not None:
            self._read_servers_file(main.resolve())
        offered: dict[str, list[OfferEntry]] = {}
        offers = tuple(offers)
        for mcp_entry in (entry for entry in offers if isinstance(entry, McpEntry)):
            for name in self._servers_of_entry(mcp_entry):
                offered.setdefault(name, []).append(mcp_entry.with_verl_limits())
        for entry in offers:
            if isinstance(entry, ServerToolsEntry) and self._check_known(entry):
                offered.setdefault(entry.server, []).append(entry)
        resolved = {}
        for name, server in self.known.items():
            resolved[name], errors = apply_offers(server, tuple(offered.get(name, ())))
            self.errors += errors
            if (found := find_rollout_problem(resolved[name].server)) is not None:
                field = f"{server.field}.{found.field}"
                self.errors.append(ConfigError(found.problem, file=server.file, field=field, remedy=found.remedy))
        return resolved

    def _servers_of_entry(self, entry: McpEntry) -> list[str]:
        """Servers in the file that an entry names, relative to the entry's file or, as in verl, the working folder."""
        path = Path(entry.mcp.mcp_servers_config_path).expanduser()
        candidates = [(folder / path).resolve() for folder in (entry.file.resolve().parent, Path.cwd())]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            searched = " nor ".join(str(display_path(candidate)) for candidate in dict.fromkeys(candidates))
            problem = f"there is no servers file {searched}"
            field = f"{entry.field}.mcp.mcp_servers_config_path"
            self.errors.append(
                ConfigError(problem, file=entry.file, field=field, remedy="create it, or correct the path")
            )
            return []
        self._read_servers_file(file)
        return self.by_file[file]

    def _read_servers_file(self, file: Path) -> None:
        if file in self.by_file:
            return
        self.by_file[file] = []
        servers_file = self.read_model(file, ServersFile)
        self.is_complete = self.is_complete and servers_file is not None
        for name, server in servers_file.mcp_servers.items() if servers_file else ():
            if server.disabled:
                self.disabled.add(name)
                continue
            try:
                resolved, files = resolve_server(name, server, file)
            except ConfigError as error:
                self.errors.append(error)
                continue
            entry = _make_server(name, server, resolved, file)
            self.files += files
            if name in self.known:
                problem = f"two servers are named {name!r}: one of {self.known[name].owner}, one of {entry.owner}"
                self.errors.append(
                    ConfigError(problem, file=entry.file, field=entry.field, remedy="give one of them another name")
                )
                continue
            self.known[name] = entry
            self.by_file[file].append(name)

    def _check_known(self, entry: ServerToolsEntry) -> bool:
        if entry.server in self.known or entry.server in self.disabled or not self.is_complete:
            return entry.server in self.known
        suggestion = closest_match(entry.server, self.known)
        known = ", ".join(self.known) or "none; give a servers file with --mcp"
        remedy = f"did you mean {suggestion!r}?" if suggestion else f"known servers: {known}"
        problem = f"there is no server {entry.server!r}"
        self.errors.append(ConfigError(problem, file=entry.file, field=f"{entry.field}.server", remedy=remedy))
        return False


def _make_server(name: str, section: ServerSection, server: Server, file: Path) -> ConfiguredServer:
    """A server of a file, offered with the defaults."""
    entry = ConfiguredServer(
        name=name,
        server=server,
        offers=(),
        included=section.include_tools,
        excluded=section.exclude_tools,
        timeout_s=section.timeout_s,
    )
    location = Location(display_path(file), format_loc(("mcpServers", name)))
    return entry.with_offers((OfferEntry().with_location(location),)).with_location(location)
