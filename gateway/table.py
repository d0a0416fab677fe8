"""The list that a gateway offers: every tool of every source under one safe name, with one owner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gateway.errors import ConfigError
from gateway.media.admit import Admission
from gateway.schema import Checker, SchemaError, safe_name
from gateway.toolset import Toolset, collision
from gateway.types import ToolSpec


@dataclass(slots=True, eq=False)
class Source:
    """A toolset of the gateway, and the part of the configuration that it came from."""

    key: str
    """Equal keys mean equal configuration: a reload keeps such a source as it is."""
    toolset: Toolset
    leaf: object = None
    """The toolset behind the limits and names, for its status."""
    ours: bool = True
    """What we or the operator wrote must be right; a third party's mistakes are set aside instead."""
    admit: Admission | None = field(default_factory=Admission)
    """What a policy is shown of its media; None where the toolset has seen to that by itself."""


@dataclass(frozen=True, slots=True)
class Tool:
    spec: ToolSpec
    inner: str
    """The name that the source knows it by."""
    source: Source
    checker: Checker


@dataclass(frozen=True, slots=True)
class Table:
    tools: Mapping[str, Tool]
    set_aside: Mapping[str, str]
    """What is not offered, by name, and why."""
    seen: tuple[Sequence[ToolSpec], ...] = ()
    specs: tuple[ToolSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(tool.spec for tool in self.tools.values()))

    def of(self, source: Source) -> dict[str, Tool]:
        return {name: tool for name, tool in self.tools.items() if tool.source is source}


EMPTY_TABLE = Table({}, {})


def stale(table: Table, sources: Sequence[Source]) -> bool:
    """Whether a source changed its listing; sources keep the same object until they do."""
    if len(table.seen) != len(sources):
        return True
    return any(seen is not source.toolset.specs for seen, source in zip(table.seen, sources, strict=True))


def table(sources: Sequence[Source], before: Table = EMPTY_TABLE, *, starting: bool = False) -> Table:
    """A new table. While starting, two owners of one name stop us; later the newcomer is set aside."""
    tools: dict[str, Tool] = {}
    set_aside: dict[str, str] = {}
    listings = tuple(source.toolset.specs for source in sources)
    for source, spec in _by_seniority(sources, listings, before):
        name = safe_name(spec.name)
        if name in tools:
            error = collision(tools[name].spec, spec)
            if starting:
                raise error
            set_aside[f"{name} of {spec.owner}"] = error.problem
            continue
        try:
            tools[name] = _tool(name, spec, source, before)
        except SchemaError as error:
            if source.ours:
                raise ConfigError(str(error), file=spec.owner, field=f"{spec.name}: parameters") from error
            set_aside[name] = str(error)
    return Table(tools, set_aside, listings)


def _by_seniority(
    sources: Sequence[Source], listings: Sequence[Sequence[ToolSpec]], before: Table
) -> Iterable[tuple[Source, ToolSpec]]:
    """Owners that had their name before come first, so that a newcomer can't take one over."""
    pairs = [(source, spec) for source, specs in zip(sources, listings, strict=True) for spec in specs]

    def is_new(pair: tuple[Source, ToolSpec]) -> bool:
        tool = before.tools.get(safe_name(pair[1].name))
        return tool is None or tool.source is not pair[0]

    return sorted(pairs, key=is_new) if before.tools else pairs


def _tool(name: str, spec: ToolSpec, source: Source, before: Table) -> Tool:
    """Compiling a schema costs more than a call, so an unchanged tool keeps its checker."""
    old = before.tools.get(name)
    if old is not None and old.source is source and old.spec.parameters is spec.parameters:
        return replace(old, spec=replace(spec, name=name))
    return Tool(replace(spec, name=name), spec.name, source, Checker(spec.parameters))
