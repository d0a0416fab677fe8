"""A rollout is an append-only ledger of who wrote which tokens; everything else is a view on it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain, groupby
from types import MappingProxyType
from typing import Any

from gateway.types import Audio, Image, Outcome, Part, ToolCall, Video

Message = Mapping[str, Any]
"""A chat message as templates take it."""
Medium = Image | Audio | Video
NOTHING: Mapping[str, Any] = MappingProxyType({})
Spells = tuple[tuple[int, int], ...]
"""Versions of the policy, in order, each with how many ids in a row it sampled."""


def spelled(versions: Sequence[int], last: int) -> tuple[int, Spells]:
    """The versions of ids in a row as that of the last one and the spells before it; of no ids, `last`."""
    spells = [(version, sum(1 for _ in run)) for version, run in groupby(versions)]
    return (spells[-1][0], tuple(spells[:-1])) if spells else (last, ())


class Author(StrEnum):
    """Who wrote an entry. The loss mask is `author is POLICY`, and nothing derives it anew."""

    TASK = "task"
    POLICY = "policy"
    TOOL = "tool"
    FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one author wrote at one go. Ids are as they were sampled or rendered, never decoded and encoded again."""

    author: Author
    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    """The chat messages that these ids say, in order."""
    logprobs: tuple[float, ...] | None = None
    """Of each sampled id, as the engine gave it; only what the policy wrote has any."""
    version: int | None = None
    """The policy's version that sampled the ids; the last one, where weights changed on the way."""
    before: Spells = ()
    """The versions that sampled the first of the ids, where weights changed on the way."""
    cached: int = 0
    """Of the ids before this entry, how many the engine had at hand."""
    stop: str | None = None
    """Why the policy stopped writing: `stop`, `length` or `abort`."""
    parts: tuple[Part, ...] = ()
    """What a tool or an interaction answered; pictures stand where their ids stand."""
    spans: tuple[tuple[int, int], ...] = ()
    """Of each medium in `parts`, in order, the first of this entry's ids that stands for it and the one after the
    last, which is the same for one without a place; empty where the template gave them none at all."""
    widths: tuple[int, ...] = ()
    """Of each span, how many ids the model has in its place: a picture is asked for by one id, and seen as many."""
    calls: tuple[ToolCall, ...] = ()
    """The calls that the policy wrote here."""
    outcomes: tuple[Outcome, ...] = ()
    """How each call ended that this entry answers."""
    reward: float | None = None
    """The number that came with this entry: of a tool, or of feedback on the turn before it."""
    source: str = ""
    """The tools, the interaction or the plug-in that this came from."""
    info: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    """What else is known: timings, metrics, what a plug-in passed on."""

    def __post_init__(self) -> None:
        if (self.logprobs is not None) != (self.author is Author.POLICY):
            raise ValueError("what the policy wrote has a logprob for each id, and nothing else has any")
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids with {len(self.logprobs)} logprobs")
        if self.before and (self.version is None or sum(count for _, count in self.before) > len(self.ids)):
            raise ValueError(f"{len(self.ids)} ids with versions {self.before} before {self.version}")
        if self.reward is not None and self.author not in (Author.TOOL, Author.FEEDBACK):
            raise ValueError("only a tool or feedback gives a reward, and it belongs to the turn before it")
        if self.spans and len(self.spans) != len(self.media):
            raise ValueError(f"{len(self.media)} media with {len(self.spans)} spans")
        if not all(0 <= start <= stop <= len(self.ids) for start, stop in self.spans):
            raise ValueError(f"spans {self.spans} do not lie within {len(self.ids)} ids")
        if self.widths:
            self._widens()

    def _widens(self) -> None:
        """What is widened is widened in order, and is more of an id that is there."""
        if len(self.widths) != len(self.spans):
            raise ValueError(f"{len(self.spans)} spans with {len(self.widths)} widths")
        borders = [border for span in self.spans for border in span]
        shown = all((width > 0) == (start < stop) for width, (start, stop) in zip(self.widths, self.spans, strict=True))
        if borders != sorted(borders) or not shown or min(self.widths) < 0:
            raise ValueError(f"spans {self.spans} cannot be as wide as {self.widths}")
        if self.logprobs is not None:
            raise ValueError("what the policy wrote is as wide as it wrote it")

    @property
    def expanded(self) -> Entry:
        """As the model sees it: each medium as wide as it is there."""
        if all(width == stop - start for width, (start, stop) in zip(self.widths, self.spans, strict=False)):
            return self
        ids: list[int] = []
        spans, done = [], 0
        for (start, stop), width in zip(self.spans, self.widths, strict=True):
            ids += self.ids[done:start]
            spans.append((len(ids), len(ids) + width))
            ids += self.ids[start : start + 1] * width
            done = stop
        return replace(self, ids=(*ids, *self.ids[done:]), spans=tuple(spans))

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Of each id."""
        known = tuple(chain.from_iterable((version,) * count for version, count in self.before))
        return known + (self.version,) * (len(self.ids) - len(known))

    @property
    def media(self) -> tuple[Medium, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image | Audio | Video))


@dataclass(frozen=True, slots=True)
class Place:
    """A medium and the ids of the ledger that stand for it, from `start` up to but not including `stop`."""

    medium: Medium
    start: int
    stop: int


@dataclass(frozen=True)
class Ledger:
    """Entries in the order in which they were written. A ledger plus an entry is a ledger."""

    entries: tuple[Entry, ...] = ()

    def __add__(self, entry: Entry) -> Ledger:
        grown = Ledger((*self.entries, entry))
        if "ids" in self.__dict__:  # Asked for once, they grow: a turn costs no walk over all the turns before it.
            grown.__dict__["ids"] = self.ids + entry.ids
        if self.__dict__.get("_wide") is not None:
            grown.__dict__["_wide"] = self.expanded + entry.expanded
        return grown

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        """Tokens, not entries."""
        return len(self.ids)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(entry.ids for entry in self.entries))

    @cached_property
    def mask(self) -> tuple[bool, ...]:
        """True for each id that the policy wrote: what the loss sees."""
        return tuple(chain.from_iterable((entry.author is Author.POLICY,) * len(entry.ids) for entry in self.entries))

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """0.0 where nothing was sampled, so that it lines up with the ids."""
        return tuple(chain.from_iterable(entry.logprobs or (0.0,) * len(entry.ids) for entry in self.entries))

    @cached_property
    def versions(self) -> tuple[int | None, ...]:
        """The policy's version that sampled each id; None where nothing was sampled."""
        return tuple(chain.from_iterable(entry.versions for entry in self.entries))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each entry begins."""
        return tuple(accumulate((len(entry.ids) for entry in self.entries[:-1]), initial=0)) if self.entries else ()

    @property
    def expanded(self) -> Ledger:
        """The same as the model sees it, media as wide as they are there: what is learned from. Itself, without any."""
        return self if self._wide is None else self._wide

    @cached_property
    def _wide(self) -> Ledger | None:
        entries = tuple(entry.expanded if entry.widths else entry for entry in self.entries)
        same = all(one is other for one, other in zip(entries, self.entries, strict=True))
        return None if same else Ledger(entries)

    def widened(self, token: int) -> int:
        """Where an id of this ledger stands in `expanded`; of a medium, the first that stands for it."""
        entry, within = self._within(token)
        return self.expanded.starts[entry] + _moved(within, self.entries[entry], self.expanded.entries[entry])

    def narrowed(self, token: int) -> int:
        """Where an id of `expanded` stands in this ledger."""
        entry, within = self.expanded._within(token)
        return self.starts[entry] + _moved(within, self.expanded.entries[entry], self.entries[entry])

    @cached_property
    def images(self) -> tuple[Image, ...]:
        """Those that ids stand for, as an engine is given them."""
        return tuple(place.medium for place in self.places if isinstance(place.medium, Image))

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The media that ids stand for, in order."""
        return tuple(
            Place(medium, begin + start, begin + stop)
            for begin, entry in zip(self.starts, self.entries, strict=True)
            for medium, (start, stop) in zip(entry.media, entry.spans, strict=False)
            if start < stop
        )

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for entry in self.entries for message in entry.messages)

    @property
    def turns(self) -> Sequence[Entry]:
        """The policy's turns."""
        return [entry for entry in self.entries if entry.author is Author.POLICY]

    @cached_property
    def rewards(self) -> tuple[tuple[float, ...], ...]:
        """Of each of the policy's turns, the numbers that tools and feedback answered it with."""
        given: list[list[float]] = []
        for entry in self.entries:
            if entry.author is Author.POLICY:
                given.append([])
            elif entry.reward is not None and given:
                given[-1].append(entry.reward)
        return tuple(map(tuple, given))

    @cached_property
    def asked(self) -> int:
        """The ids that engines were asked to continue, over all turns: a history counts at each turn again, media as
        wide as they are seen."""
        starts = self.expanded.starts
        return sum(start for start, entry in zip(starts, self.entries, strict=True) if entry.author is Author.POLICY)

    @cached_property
    def cached(self) -> int:
        """Of `asked`, how many ids an engine had at hand."""
        return sum(entry.cached for entry in self.turns)

    def entry_at(self, token: int) -> Entry:
        """The entry that the token belongs to."""
        return self.entries[self._entry_of(token)]

    def author_at(self, token: int) -> Author:
        return self.entry_at(token).author

    def turn_of(self, token: int) -> int | None:
        """The policy's turn that wrote the token, or that it answers; None before the first turn."""
        until = self.entries[: self._entry_of(token) + 1]
        turns = sum(entry.author is Author.POLICY for entry in until)
        return turns - 1 if turns else None

    def _within(self, token: int) -> tuple[int, int]:
        """The entry's number, and the token's place in it."""
        entry = self._entry_of(token)
        return entry, token - self.starts[entry]

    def _entry_of(self, token: int) -> int:
        if not 0 <= token < len(self):
            raise IndexError(f"there are {len(self)} tokens, counted from 0, and no token {token}")
        return bisect_right(self.starts, token) - 1


def _moved(place: int, here: Entry, there: Entry) -> int:
    """The same id in an entry whose media are of other widths; within a medium, the first id of it."""
    moved = 0
    if here is there:
        return place
    for (start, stop), (_, other) in zip(here.spans, there.spans, strict=True):
        if place < start:
            break
        if place < stop:
            return start + moved
        moved = other - stop
    return place + moved
