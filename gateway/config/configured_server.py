"""The MCP servers of a configuration with the entries that offer their tools.

Entries may override settings of the server whose tools they offer, but must not contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Self

from pydantic import SerializeAsAny, ValidationError

from gateway.config.diagnostics import closest_match
from gateway.config.entries import Entry, OfferEntry
from gateway.config.models import Server
from gateway.errors import ConfigError

OVERRIDES = ("isolation", "warm", "most", "idle_s", "connect_timeout_s", "result_bytes", "result_values", "on_clash")
"""Settings of a server that an entry may override."""


class ConfiguredServer(Entry):
    """An MCP server with the entries that offer its tools."""

    name: str
    """Name in the servers file."""
    server: Server
    """How to start or reach it, with the entries' overrides."""
    offers: tuple[SerializeAsAny[OfferEntry], ...]
    """The entries that offer its tools; a default one if none does."""
    included: tuple[str, ...] | None = None
    """The tools that the servers file offers; None for all."""
    excluded: tuple[str, ...] = ()
    """Tools that the servers file does not offer."""
    timeout_s: float | None = None
    """Deadline of a call from the servers file, for entries without one of their own."""

    def offer(self, tool: str) -> OfferEntry | None:
        """The entry that offers a tool: one that names it, else one that offers all; None if it is not offered."""
        for offer in self.offers:
            if offer.selects(self.name, tool):
                return offer
        is_hidden = tool in self.excluded or (self.included is not None and tool not in self.included)
        return None if is_hidden else next((offer for offer in self.offers if offer.selected is None), None)

    def with_offers(self, offers: tuple[OfferEntry, ...]) -> Self:
        """The server offered by these entries, with its own deadline where they have none."""
        if self.timeout_s is not None:
            update = {"timeout_s": self.timeout_s}
            offers = tuple(o if "timeout_s" in o.model_fields_set else o.model_copy(update=update) for o in offers)
        return self.model_copy(update={"offers": offers})


def apply_offers(entry: ConfiguredServer, offers: tuple[OfferEntry, ...]) -> tuple[ConfiguredServer, list[ConfigError]]:
    """The server with its entries' overrides, and the errors where entries contradict each other."""
    errors = [*_conflicting_overrides(entry, offers), *_overlapping_selections(entry, offers)]
    if errors or not offers:
        return entry, errors
    overrides = {name: value for offer in offers for name in OVERRIDES if (value := getattr(offer, name)) is not None}
    fields = {name: getattr(entry.server, name) for name in entry.server.model_fields_set}
    try:
        server = Server.model_validate({**fields, **overrides})
    except ValidationError as error:
        rule = error.errors(include_url=False)[0]["ctx"]
        return entry, [_entry_error(offers[0], f"server {entry.name!r}: {rule['problem']}", str(rule["remedy"]))]
    return entry.model_copy(update={"server": server}).with_offers(offers), []


def _conflicting_overrides(entry: ConfiguredServer, offers: tuple[OfferEntry, ...]) -> Iterator[ConfigError]:
    for name in OVERRIDES:
        overriding = [offer for offer in offers if getattr(offer, name) is not None]
        for other in overriding[1:]:
            if getattr(overriding[0], name) != getattr(other, name):
                owners = f"one of {overriding[0].owner}, one of {other.owner}"
                problem = f"server {entry.name!r} has two values of `{name}`: {owners}"
                yield _entry_error(other, problem, f"keep `{name}` in one of them")


def _overlapping_selections(entry: ConfiguredServer, offers: tuple[OfferEntry, ...]) -> Iterator[ConfigError]:
    for first, other in combinations(offers, 2):
        owners = f"one of {first.owner}, one of {other.owner}"
        if first.selected is None and other.selected is None:
            problem = f"all tools of server {entry.name!r} are offered by two entries: {owners}"
            yield _entry_error(other, problem, "give one of them `allow`, or remove it")
        elif both := set(first.selected or ()).intersection(other.selected or ()):
            problem = f"the tool {min(both)!r} of server {entry.name!r} is in two entries: {owners}"
            yield _entry_error(other, problem, "leave it in one of them")


def _entry_error(entry: Entry, problem: str, remedy: str) -> ConfigError:
    return ConfigError(problem, file=entry.file, field=entry.field, remedy=remedy)


def find_unknown_tools(entries: Iterable[ConfiguredServer], listed: Mapping[str, Iterable[str]]) -> list[ConfigError]:
    """Errors for tools that an entry names and none of its servers has; checked once all of them listed their tools."""
    servers_of_offer: dict[str, tuple[OfferEntry, list[str]]] = {}
    for entry in entries:
        for offer in entry.offers:
            servers_of_offer.setdefault(offer.owner, (offer, []))[1].append(entry.name)
    errors = []
    for offer, servers in servers_of_offer.values():
        if not all(name in listed for name in servers):
            continue
        tools = [(name, tool) for name in servers for tool in listed[name]]
        known = {tool for _, tool in tools} | {f"{name}_{tool}" for name, tool in tools}
        for tool_name in (*(offer.selected or ()), *offer.parse_tools):
            if tool_name not in known:
                suggestion = closest_match(tool_name, [tool for _, tool in tools])
                remedy = f"did you mean `{suggestion}`?" if suggestion else "remove it, or see `mtrl-gateway list`"
                errors.append(_entry_error(offer, f"{' and '.join(servers)} has no tool {tool_name!r}", remedy))
    return errors
