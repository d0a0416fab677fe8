"""All files are read before anything starts, and all their mistakes are told at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gateway.config.entries import (
    ClassEntry,
    Entry,
    FunctionEntry,
    InteractionEntry,
    McpEntry,
    Offer,
    Place,
    ServerTools,
    shown,
)
from gateway.config.env import Expansion, path
from gateway.config.files import ServersFile, ToolsFile, WrittenServer
from gateway.config.mistakes import mistakes, nearest
from gateway.config.models import Frozen, Limits, ResultLimit, Server
from gateway.config.read import read
from gateway.config.servers import ServerEntry, governed
from gateway.errors import ConfigError, ConfigErrors

File = TypeVar("File", bound=Frozen)
E = TypeVar("E", bound=Entry)
L = TypeVar("L", bound=Limits)


class Config(Frozen):
    """Everything that the files say, each entry with its place."""

    tools: tuple[ClassEntry | FunctionEntry, ...] = ()
    """The native tools."""
    interactions: tuple[InteractionEntry, ...] = ()
    """The feedback interactions; their names differ."""
    servers: dict[str, ServerEntry] = {}
    """The MCP servers by name, each with the entries that govern it."""
    files: tuple[Path, ...] = ()
    """Every file that was read."""


def load(
    tools: Path | Sequence[Path] | None,
    servers: Path | None,
    env: Mapping[str, str] = os.environ,
    result_limit: ResultLimit | None = None,
) -> Config:
    """What folders of YAML, or files, and a servers file say; raises `ConfigErrors` with every mistake.

    `result_limit` holds for each entry that has none of its own.
    """
    reading = _Reading(env)
    places = [tools] if isinstance(tools, Path) else tools or ()
    files = dict.fromkeys(file for place in places for file in reading.tool_files(place))
    written = [(file, found) for file in files if (found := reading.file(file, ToolsFile))]
    natives: list[ClassEntry | FunctionEntry] = []
    offers: list[McpEntry | ServerTools] = []
    interactions: list[InteractionEntry] = []
    for file, found in written:
        for entry in _placed(found.tools, shown(file), "tools"):
            if isinstance(entry, McpEntry | ServerTools):
                offers.append(entry)
            else:
                natives.append(entry)
        interactions += _placed(found.interaction, shown(file), "interaction")
    reading.distinct(natives, lambda entry: entry.known_name, "tools", "give one of them another name or a `prefix`")
    reading.distinct(interactions, lambda entry: entry.offered_name, "interactions", "give one of them another `name`")
    found_servers = reading.servers(servers, offers)
    if reading.mistakes:
        raise ConfigErrors(reading.mistakes)
    return Config(
        tools=tuple(_within(entry, result_limit) for entry in natives),
        interactions=tuple(_named(entry) for entry in interactions),
        servers={name: _offering(entry, result_limit) for name, entry in found_servers.items()},
        files=tuple(reading.files),
    )


def _placed(entries: Iterable[E], file: Path, field: str) -> Iterator[E]:
    for place, entry in enumerate(entries):
        yield entry.placed(Place(file, f"{field}[{place}]"))


def _within(entry: L, limit: ResultLimit | None) -> L:
    return entry if limit is None or entry.result_limit else entry.model_copy(update={"result_limit": limit})


def _offering(entry: ServerEntry, limit: ResultLimit | None) -> ServerEntry:
    return entry.model_copy(update={"offers": tuple(_within(offer, limit) for offer in entry.offers)})


def _named(entry: InteractionEntry) -> InteractionEntry:
    name = entry.offered_name
    return entry.model_copy(update={"name": name, "config": {**entry.config, "name": name}})


class _Reading:
    """One reading of all files, and what went wrong in it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.mistakes: list[ConfigError] = []
        self.files: list[Path] = []
        self.known: dict[str, ServerEntry] = {}
        self.disabled: set[str] = set()
        self.by_file: dict[Path, list[str]] = {}
        self.complete = True
        """Every servers file could be read, so that a server that is not known does not exist."""

    def tool_files(self, tools: Path) -> list[Path]:
        if tools.is_file():
            return [tools.resolve()]
        if not tools.is_dir():
            kind = "file" if tools.suffix in (".yaml", ".yml") else "folder"
            remedy = f"create the {kind}, or name another with --tools"
            self.mistakes.append(ConfigError(f"there is no such {kind}", file=shown(tools), remedy=remedy))
            return []
        files = (file for file in tools.resolve().iterdir() if file.suffix in (".yaml", ".yml"))
        return sorted(file for file in files if not file.name.startswith("."))

    def file(self, file: Path, model: type[File]) -> File | None:
        self.files.append(file)
        expansion = Expansion(self.env, shown(file))
        try:
            raw = read(file)
            tree = expansion.tree({} if raw is None else raw)
            self.mistakes += expansion.mistakes.values()
            return model.model_validate(tree)
        except ConfigError as error:
            self.mistakes.append(error)
        except ValidationError as error:
            self.mistakes += mistakes(error, tree, file, expansion)
        return None

    def distinct(self, entries: Iterable[E], name: Callable[[E], str | None], kind: str, remedy: str) -> None:
        owners: dict[str, str] = {}
        for entry in entries:
            if (key := name(entry)) is None:
                continue
            if key in owners:
                problem = f"two {kind} are named {key!r}: one of {owners[key]}, one of {entry.owner}"
                self.mistakes.append(ConfigError(problem, file=entry.file, field=entry.field, remedy=remedy))
            owners.setdefault(key, entry.owner)

    def servers(self, main: Path | None, offers: Iterable[McpEntry | ServerTools]) -> dict[str, ServerEntry]:
        if main is not None:
            self._server_file(main.resolve())
        offered: dict[str, list[Offer]] = {}
        offers = tuple(offers)
        for whole in (entry for entry in offers if isinstance(entry, McpEntry)):
            for name in self._named_file(whole):
                offered.setdefault(name, []).append(whole.in_our_words())
        for entry in offers:
            if isinstance(entry, ServerTools) and self._is_known(entry):
                offered.setdefault(entry.server, []).append(entry)
        found = {}
        for name, server in self.known.items():
            found[name], at_odds = governed(server, tuple(offered.get(name, ())))
            self.mistakes += at_odds
        return found

    def _named_file(self, entry: McpEntry) -> list[str]:
        """Servers of the file that an entry names: beside the entry's own, or, as in verl, in the working folder."""
        written = Path(entry.mcp.mcp_servers_config_path).expanduser()
        places = [(folder / written).resolve() for folder in (entry.file.resolve().parent, Path.cwd())]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            problem = f"there is no servers file {' nor '.join(str(shown(place)) for place in dict.fromkeys(places))}"
            field = f"{entry.field}.mcp.mcp_servers_config_path"
            self.mistakes.append(
                ConfigError(problem, file=entry.file, field=field, remedy="create it, or correct the path")
            )
            return []
        self._server_file(file)
        return self.by_file[file]

    def _server_file(self, file: Path) -> None:
        if file in self.by_file:
            return
        self.by_file[file] = []
        written = self.file(file, ServersFile)
        self.complete = self.complete and written is not None
        for name, server in written.mcp_servers.items() if written else ():
            if server.disabled:
                self.disabled.add(name)
                continue
            entry = _server(name, server, file)
            if name in self.known:
                problem = f"two servers are named {name!r}: one of {self.known[name].owner}, one of {entry.owner}"
                self.mistakes.append(
                    ConfigError(problem, file=entry.file, field=entry.field, remedy="give one of them another name")
                )
                continue
            self.known[name] = entry
            self.by_file[file].append(name)

    def _is_known(self, entry: ServerTools) -> bool:
        if entry.server in self.known or entry.server in self.disabled or not self.complete:
            return entry.server in self.known
        near = nearest(entry.server, self.known)
        known = ", ".join(self.known) or "none; give a servers file with --mcp"
        remedy = f"did you mean {near!r}?" if near else f"known servers: {known}"
        problem = f"there is no server {entry.server!r}"
        self.mistakes.append(ConfigError(problem, file=entry.file, field=f"{entry.field}.server", remedy=remedy))
        return False


def _server(name: str, written: WrittenServer, file: Path) -> ServerEntry:
    """A server with its relative paths seen from the file."""
    given = written.meant()
    if written.cwd is not None:
        given["cwd"] = file.parent / written.cwd.expanduser()
    if written.command is not None and written.command.startswith(("./", "../", "~/")):
        given["command"] = str((file.parent / Path(written.command).expanduser()).resolve())
    place = Place(shown(file), path(("mcpServers", name)))
    entry = ServerEntry(name=name, server=Server(**given), offers=(Offer().placed(place),))
    return entry.placed(place)
