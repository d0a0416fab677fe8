"""A rollout is an append-only ledger of who wrote which tokens; everything else is a view on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from gateway.types import Image, Outcome, Part, ToolCall

Message = Mapping[str, Any]
"""A chat message as templates take it."""
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


@dataclass(frozen=True)
class Ledger:
    """Entries in the order in which they were written. A ledger plus an entry is a ledger."""

    entries: tuple[Entry, ...] = ()

    def __add__(self, entry: Entry) -> Ledger:
        return Ledger((*self.entries, entry))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        """Tokens, not entries."""
        return len(self.ids)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for entry in self.entries for token in entry.ids)

    @cached_property
    def mask(self) -> tuple[bool, ...]:
        """True for each id that the policy wrote: what the loss sees."""
        return tuple(entry.author is Author.POLICY for entry in self.entries for _ in entry.ids)

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """0.0 where nothing was sampled, so that it lines up with the ids."""
        return tuple(value for entry in self.entries for value in entry.logprobs or (0.0,) * len(entry.ids))

    @cached_property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for entry in self.entries for part in entry.parts if isinstance(part, Image))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for entry in self.entries for message in entry.messages)

    @property
    def turns(self) -> Sequence[Entry]:
        """The policy's turns."""
        return [entry for entry in self.entries if entry.author is Author.POLICY]
