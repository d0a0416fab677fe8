"""A rollout is an append-only ledger of who wrote which tokens; everything else is a view on it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any

from gateway.types import Audio, Image, Outcome, Part, ToolCall, Video

Message = Mapping[str, Any]
"""A chat message as templates take it."""
Medium = Image | Audio | Video
NOTHING: Mapping[str, Any] = MappingProxyType({})


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
    """The policy's version that sampled the ids."""
    cached: int = 0
    """Of the ids before this entry, how many the engine had at hand."""
    stop: str | None = None
    """Why the policy stopped writing: `stop`, `length` or `abort`."""
    parts: tuple[Part, ...] = ()
    """What a tool or an interaction answered; pictures stand where their ids stand."""
    spans: tuple[tuple[int, int], ...] = ()
    """Of each medium in `parts`, in order, the first of this entry's ids that stands for it and the one after the
    last; empty where the template gave them no place."""
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
        if self.reward is not None and self.author not in (Author.TOOL, Author.FEEDBACK):
            raise ValueError("only a tool or feedback gives a reward, and it belongs to the turn before it")
        if self.spans and len(self.spans) != len(self.media):
            raise ValueError(f"{len(self.media)} media with {len(self.spans)} spans")
        if not all(0 <= start <= stop <= len(self.ids) for start, stop in self.spans):
            raise ValueError(f"spans {self.spans} do not lie within {len(self.ids)} ids")

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
        return tuple(chain.from_iterable((entry.version,) * len(entry.ids) for entry in self.entries))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each entry begins."""
        return tuple(accumulate((len(entry.ids) for entry in self.entries[:-1]), initial=0)) if self.entries else ()

    @cached_property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for entry in self.entries for part in entry.parts if isinstance(part, Image))

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The media that ids stand for, in order."""
        return tuple(
            Place(medium, begin + start, begin + stop)
            for begin, entry in zip(self.starts, self.entries, strict=True)
            for medium, (start, stop) in zip(entry.media, entry.spans, strict=False)
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
        """The ids that engines were asked to continue, over all turns: a history counts at each turn again."""
        return sum(
            start for start, entry in zip(self.starts, self.entries, strict=True) if entry.author is Author.POLICY
        )

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

    def _entry_of(self, token: int) -> int:
        if not 0 <= token < len(self):
            raise IndexError(f"there are {len(self)} tokens, counted from 0, and no token {token}")
        return bisect_right(self.starts, token) - 1
