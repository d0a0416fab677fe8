"""A server is governed by the entries that name it: each says what it wants, and two may not want different things."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

from pydantic import SerializeAsAny, ValidationError

from gateway.config.entries import Entry, Offer
from gateway.config.mistakes import nearest
from gateway.config.models import Server
from gateway.errors import ConfigError

REPLACED = ("isolation", "warm", "most", "idle_s", "connect_timeout_s", "result_bytes")
"""What an entry may say of a server in place of the servers file."""


class ServerEntry(Entry):
    name: str
    """Its name in the servers file."""
    server: Server
    """How to reach it, with what the entries replace."""
    offers: tuple[SerializeAsAny[Offer], ...]
    """The entries that govern it; one with the defaults where none names it."""

    def offer(self, tool: str) -> Offer | None:
        """The entry that governs a tool: one that names it, or else one that takes all; None leaves it out."""
        named = (one for one in self.offers if one.names(self.name, tool))
        return next(named, next((one for one in self.offers if one.selected is None), None))


def governed(entry: ServerEntry, offers: tuple[Offer, ...]) -> tuple[ServerEntry, list[ConfigError]]:
    """The server as its entries want it, and where they are at odds."""
    found = [*_contradictions(entry, offers), *_overlaps(entry, offers)]
    if found or not offers:
        return entry, found
    replaced = {name: value for one in offers for name in REPLACED if (value := getattr(one, name)) is not None}
    given = {name: getattr(entry.server, name) for name in entry.server.model_fields_set}
    try:
        server = Server.model_validate({**given, **replaced})
    except ValidationError as error:
        rule = error.errors(include_url=False)[0]["ctx"]
        return entry, [_mistake(offers[0], f"server {entry.name!r}: {rule['problem']}", str(rule["remedy"]))]
    return entry.model_copy(update={"server": server, "offers": offers}), []


def _contradictions(entry: ServerEntry, offers: tuple[Offer, ...]) -> Iterator[ConfigError]:
    for name in REPLACED:
        saying = [one for one in offers if getattr(one, name) is not None]
        for other in saying[1:]:
            if getattr(saying[0], name) != getattr(other, name):
                owners = f"one of {saying[0].owner}, one of {other.owner}"
                problem = f"server {entry.name!r} has two values of `{name}`: {owners}"
                yield _mistake(other, problem, f"say `{name}` in one of them")


def _overlaps(entry: ServerEntry, offers: tuple[Offer, ...]) -> Iterator[ConfigError]:
    for one, other in combinations(offers, 2):
        owners = f"one of {one.owner}, one of {other.owner}"
        if one.selected is None and other.selected is None:
            problem = f"all tools of server {entry.name!r} are offered by two entries: {owners}"
            yield _mistake(other, problem, "give one of them `allow`, or remove it")
        elif both := set(one.selected or ()).intersection(other.selected or ()):
            problem = f"the tool {min(both)!r} of server {entry.name!r} is in two entries: {owners}"
            yield _mistake(other, problem, "leave it in one of them")


def _mistake(entry: Entry, problem: str, remedy: str) -> ConfigError:
    return ConfigError(problem, file=entry.file, field=entry.field, remedy=remedy)


def unmatched(entries: Iterable[ServerEntry], listed: Mapping[str, Iterable[str]]) -> list[ConfigError]:
    """Tools that an entry names and no server of it has, once all of its servers have said what they have."""
    governs: dict[str, tuple[Offer, list[str]]] = {}
    for entry in entries:
        for one in entry.offers:
            governs.setdefault(one.owner, (one, []))[1].append(entry.name)
    found = []
    for one, servers in governs.values():
        if not all(name in listed for name in servers):
            continue
        tools = [(name, tool) for name in servers for tool in listed[name]]
        known = {tool for _, tool in tools} | {f"{name}_{tool}" for name, tool in tools}
        for wanted in (*(one.selected or ()), *one.parse_tools):
            if wanted not in known:
                near = nearest(wanted, [tool for _, tool in tools])
                remedy = f"did you mean `{near}`?" if near else "remove it, or see `mtrl-gateway list`"
                found.append(_mistake(one, f"{' and '.join(servers)} has no tool {wanted!r}", remedy))
    return found
