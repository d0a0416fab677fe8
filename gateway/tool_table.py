"""The gateway's table of tools: every tool of every source under a unique, safe name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Literal

from gateway.errors import ConfigError, ConfigErrors, SessionError
from gateway.limits import LimitedToolset, timeout_of
from gateway.media.media_filter import MediaFilter
from gateway.schema import ArgumentChecker, SchemaError, checker_for, safe_name
from gateway.toolset import RenamedToolset, Toolset, name_collision
from gateway.types import Task, ToolSpec

if TYPE_CHECKING:
    from gateway.elicitation import ElicitationAnswers


@dataclass(slots=True, eq=False)
class Source:
    """A toolset of the gateway, with the key of its configuration."""

    key: str
    """Equal keys mean equal configuration, so that a reload keeps the source as it is."""
    toolset: Toolset
    backend: object = None
    """The toolset behind limits and renaming, for its status."""
    trusted: bool = True
    """Whether the operator wrote its schemas: then an invalid one is an error, else the tool is set aside."""
    admit: MediaFilter | None = field(default_factory=MediaFilter)
    """Limits on media of results; None if the toolset applies them itself."""
    name: str = ""
    """The server's name."""
    sandbox_name: str = "sandbox"
    """The name of its state, where it has no server."""
    on_clash: Literal["prefix", "refuse", "first"] = "refuse"
    """What happens to a tool whose name an earlier source has."""
    answers: ElicitationAnswers | None = None
    """The operator's answers to questions of its server."""
    in_order: bool = False
    """Whether the calls of one message run one after the other, each checked after the one before it has ended."""
    is_limited: bool = field(init=False)
    """Whether nothing but names is between a session and the toolset's limits, and nothing after them."""

    def __post_init__(self) -> None:
        toolset = self.toolset
        while isinstance(toolset, RenamedToolset):
            toolset = toolset.inner
        self.is_limited = self.admit is None and isinstance(toolset, LimitedToolset)

    @property
    def state_name(self) -> str:
        """The name under which the hash of its state is told."""
        return self.name or self.sandbox_name


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool under the name that the gateway offers."""

    spec: ToolSpec
    source_name: str
    """Its name in the source."""
    source: Source
    checker: ArgumentChecker

    def timeout_s(self) -> float:
        """What one call may take; infinite if nothing limits it."""
        return timeout_of(self.source.toolset, self.source_name)


@dataclass(frozen=True, slots=True)
class ToolTable:
    """All tools that the gateway offers, by name."""

    tools: Mapping[str, OfferedTool]
    set_aside: Mapping[str, str]
    """The reason for each tool that is not offered, by name."""
    clashes: Mapping[str, str] = field(default_factory=dict)
    """What became of each tool whose name another one has."""
    listings: tuple[Sequence[ToolSpec], ...] = ()
    specs: tuple[ToolSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(tool.spec for tool in self.tools.values()))

    def tools_of(self, source: Source) -> dict[str, OfferedTool]:
        """The tools of one source."""
        return {name: tool for name, tool in self.tools.items() if tool.source is source}


EMPTY_TABLE = ToolTable({}, {})


def build_table(sources: Sequence[Source], before: ToolTable = EMPTY_TABLE, *, starting: bool = False) -> ToolTable:
    """Builds the table. Of two tools with one name, the source of the later one decides what happens (`on_clash`).

    The result depends on the order of the sources and not on the order in which their tools became known. Clashes that
    are refused raise while starting; after that, the later tool is set aside.
    """
    listings = tuple(source.toolset.specs for source in sources)
    set_aside: dict[str, str] = {}
    tools = list(_valid_tools(sources, listings, before, set_aside))
    names = _NameTable()
    for tool in sorted(tools, key=lambda tool: _precedence(tool, before)):
        names.claim(tool)
    names.settle_clashes(set_aside)
    if starting and names.refused:
        raise names.refused[0] if len(names.refused) == 1 else ConfigErrors(names.refused)
    order = {id(tool): number for number, tool in enumerate(tools)}
    offered = sorted(names.owners.items(), key=lambda item: order[id(item[1])])
    renamed = {name: replace(tool, spec=replace(tool.spec, name=name)) for name, tool in offered}
    return ToolTable(renamed, set_aside, names.clashes, listings)


class _NameTable:
    """Gives each tool a name. Tools keep their own names before any prefixed one is given."""

    def __init__(self) -> None:
        self.owners: dict[str, OfferedTool] = {}
        self.clashes: dict[str, str] = {}
        self.refused: list[ConfigError] = []
        self._clashing: list[tuple[str, OfferedTool]] = []

    def claim(self, tool: OfferedTool) -> None:
        """Gives the tool its own name, unless it is taken."""
        name = safe_name(tool.source_name)
        if self.owners.setdefault(name, tool) is not tool:
            self._clashing.append((name, tool))

    def settle_clashes(self, set_aside: dict[str, str]) -> None:
        """Renames, refuses or leaves out each tool whose name was taken, as its source says."""
        for name, tool in self._clashing:
            error = name_collision(self.owners[name].spec, tool.spec)
            key = f"{name} of {tool.spec.owner}"
            if tool.source.on_clash == "prefix":
                offered = self._prefixed(tool)
                self.owners[offered] = tool
                owner = self.owners[name].spec.owner or "another source"
                self.clashes[key] = f"it is offered as {offered!r}, because {owner} has {name!r}"
                continue
            if tool.source.on_clash == "refuse":
                self.refused.append(error)
            set_aside[key] = self.clashes[key] = error.problem

    def _prefixed(self, tool: OfferedTool) -> str:
        """The name with its source's name in front, and with a number if that is taken as well."""
        wanted = f"{tool.source.name}_{tool.source_name}"
        names = (safe_name(wanted if number == 1 else f"{wanted}_{number}") for number in count(1))
        return next(name for name in names if name not in self.owners)


def _precedence(tool: OfferedTool, before: ToolTable) -> tuple[bool, bool]:
    """Sorts tools that the operator wrote first, and of those the ones that had their name before."""
    if not tool.source.trusted:
        return True, False
    old = before.tools.get(safe_name(tool.source_name))
    return False, before is not EMPTY_TABLE and (old is None or old.source is not tool.source)


def _valid_tools(
    sources: Sequence[Source], listings: Sequence[Sequence[ToolSpec]], before: ToolTable, set_aside: dict[str, str]
) -> Iterator[OfferedTool]:
    """All tools with a valid schema, in the order of their sources.

    An unchanged tool keeps its checker, because compiling a schema costs more than a call.
    """
    known = {(id(tool.source), tool.source_name): tool for tool in before.tools.values()}
    for source, specs in zip(sources, listings, strict=True):
        for spec in specs:
            old = known.get((id(source), spec.name))
            if old is not None and old.spec.parameters is spec.parameters:
                yield replace(old, spec=spec)
                continue
            try:
                yield OfferedTool(spec, spec.name, source, checker_for(spec.parameters))
            except SchemaError as error:
                if source.trusted:
                    raise ConfigError(str(error), file=spec.owner, field=f"{spec.name}: parameters") from error
                set_aside[safe_name(spec.name)] = str(error)


def select_tools(task: Task, table: ToolTable) -> Mapping[str, OfferedTool]:
    """The tools that a task selects; raises for a name that is not offered, which is an error in the data."""
    unknown = [name for name in (*(task.tools or ()), *task.create) if name not in table.tools]
    if unknown:
        offered = ", ".join(sorted(table.tools)) or "none"
        raise SessionError(f"no tool named {', '.join(map(repr, unknown))}; offered are: {offered}")
    if task.tools is None:
        return table.tools
    selected = set(task.tools)
    return {name: tool for name, tool in table.tools.items() if name in selected or tool.spec.audience == "loop"}
