"""The ledger of a rollout: token ids with their authors, from which the loss mask (tools' tokens are masked) derives.

Entries are only appended. The loss mask, the logprobs, the messages and the media are all views of it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any, TypeAlias

from gateway.types import EMPTY, Audio, Image, Outcome, Part, ToolCall, Video

Message = Mapping[str, Any]
"""A chat message as templates take it."""
Medium = Image | Audio | Video
BRANCH = "branch"
"""The source of an entry that copies a turn of the policy from another ledger of the rollout, where it is trained."""
COPIED = "copied"
"""In the info of an entry that a new ledger repeats as it is in the one before."""
OFFERED = "offered"
"""In the info of a ledger's first entry: the tools that its chat offers, if those are not all of the run, by name or as
schemas."""
SUB_AGENT = "sub_agent"
"""In the info of the first entry of a ledger that is a sub-agent's chat: its name."""
VersionRuns = tuple[tuple[int, int], ...]
"""Run-length encoded policy versions: (version, number of consecutive ids that it sampled)."""


Experts: TypeAlias = "array[int]"
"""Experts that routers chose: token by token, layer by layer, as numbers of two bytes."""


def no_experts() -> Experts:
    """Nothing is known."""
    return array("h")


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """The length of the common prefix, by bisection: comparing slices is much faster than comparing ids one by one."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def encode_version_runs(versions: Sequence[int], default: int) -> tuple[int, VersionRuns]:
    """Splits the versions of consecutive ids into the last version and the runs before it; `default` without ids."""
    runs = [(version, sum(1 for _ in run)) for version, run in groupby(versions)]
    return (runs[-1][0], tuple(runs[:-1])) if runs else (default, ())


class Author(StrEnum):
    """Who wrote an entry. The loss mask is `author is POLICY` everywhere."""

    TASK = "task"
    POLICY = "policy"
    TOOL = "tool"
    FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True)
class Entry:
    """Consecutive tokens of one author, as they were sampled or rendered: never decoded and encoded again."""

    author: Author
    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    """The chat messages that these ids encode."""
    logprobs: tuple[float, ...] | None = None
    """The engine's logprob of each sampled id; None unless the policy wrote the entry."""
    version: int | None = None
    """The policy version that sampled the ids; the last one if weights changed during the turn."""
    earlier_versions: VersionRuns = ()
    """The versions that sampled the first ids, if weights changed during the turn."""
    cached_tokens: int = 0
    """Tokens before this entry that the engine read from its prefix cache."""
    experts: Experts | None = None
    """The experts that tokens were sent to, from the first for which no turn before tells that to the last but one of
    this turn."""
    finish_reason: str | None = None
    """Why generation ended: `stop`, `length` or `abort`."""
    parts: tuple[Part, ...] = ()
    """The content of a tool's or an interaction's answer, media included."""
    spans: tuple[tuple[int, int], ...] = ()
    """For each medium in `parts`, the range [start, stop) of this entry's ids that stand for it; an empty range for a
    medium that the model is not shown. Empty if the template rendered no media."""
    widths: tuple[int, ...] = ()
    """For each span, the number of tokens that the medium takes in the model: an image is sent to the engine as one
    placeholder id and expanded there."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls in a turn of the policy."""
    outcomes: tuple[Outcome, ...] = ()
    """The outcome of each call that this entry answers."""
    reward: float | None = None
    """The reward for the turn before it, from a tool or an interaction."""
    source: str = ""
    """The tools, the interaction or the plug-in that produced the entry."""
    info: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    """Timings, metrics, and what a plug-in attached."""

    def __post_init__(self) -> None:
        if (self.logprobs is not None) != (self.author is Author.POLICY):
            raise ValueError("entries of the policy need a logprob for each id; other entries must have none")
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids with {len(self.logprobs)} logprobs")
        earlier = sum(count for _, count in self.earlier_versions)
        if self.earlier_versions and (self.version is None or earlier > len(self.ids)):
            raise ValueError(f"{len(self.ids)} ids with versions {self.earlier_versions} before {self.version}")
        if self.reward is not None and self.author not in (Author.TOOL, Author.FEEDBACK):
            raise ValueError("only entries of a tool or of feedback have a reward, for the turn before them")
        if self.spans and len(self.spans) != len(self.media):
            raise ValueError(f"{len(self.media)} media with {len(self.spans)} spans")
        if not all(0 <= start <= stop <= len(self.ids) for start, stop in self.spans):
            raise ValueError(f"spans {self.spans} do not lie within {len(self.ids)} ids")
        if self.widths:
            self._check_widths()

    def _check_widths(self) -> None:
        """Spans must be in order, and a medium has a width exactly if it has a placeholder."""
        if len(self.widths) != len(self.spans):
            raise ValueError(f"{len(self.spans)} spans with {len(self.widths)} widths")
        bounds = [bound for span in self.spans for bound in span]
        shown = all((width > 0) == (start < stop) for width, (start, stop) in zip(self.widths, self.spans, strict=True))
        if bounds != sorted(bounds) or not shown or min(self.widths) < 0:
            raise ValueError(f"spans {self.spans} do not match widths {self.widths}")
        if self.logprobs is not None:
            raise ValueError("entries of the policy have no media to expand, so no widths")

    @property
    def expanded(self) -> Entry:
        """The entry as the model sees it: each medium's placeholder repeated to its width."""
        if all(width == stop - start for width, (start, stop) in zip(self.widths, self.spans, strict=False)):
            return self
        ids: list[int] = []
        spans, copied = [], 0
        for (start, stop), width in zip(self.spans, self.widths, strict=True):
            ids += self.ids[copied:start]
            spans.append((len(ids), len(ids) + width))
            ids += self.ids[start : start + 1] * width
            copied = stop
        return replace(self, ids=(*ids, *self.ids[copied:]), spans=tuple(spans))

    @property
    def versions(self) -> tuple[int | None, ...]:
        """The policy version of each id."""
        earlier = tuple(chain.from_iterable((version,) * count for version, count in self.earlier_versions))
        return earlier + (self.version,) * (len(self.ids) - len(earlier))

    @property
    def media(self) -> tuple[Medium, ...]:
        """The images, audio and videos in `parts`."""
        return tuple(part for part in self.parts if isinstance(part, Image | Audio | Video))


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A medium and the range [start, stop) of the ledger's ids that stand for it."""

    medium: Medium
    start: int
    stop: int


@dataclass(frozen=True)
class Ledger:
    """Entries in the order in which they were written. `ledger + entry` is a new ledger."""

    entries: tuple[Entry, ...] = ()

    def __add__(self, entry: Entry) -> Ledger:
        longer = Ledger((*self.entries, entry))
        if "ids" in self.__dict__:  # Extend the cached views, so that a turn does not walk all earlier ones.
            longer.__dict__["ids"] = self.ids + entry.ids
        if self.__dict__.get("_expanded") is not None:
            longer.__dict__["_expanded"] = self.expanded + entry.expanded
        return longer

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        """The number of tokens, not of entries."""
        return len(self.ids)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """All token ids."""
        return tuple(chain.from_iterable(entry.ids for entry in self.entries))

    @cached_property
    def mask(self) -> tuple[bool, ...]:
        """The loss mask: True for each id that the policy wrote."""
        return tuple(chain.from_iterable((entry.author is Author.POLICY,) * len(entry.ids) for entry in self.entries))

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """The engine's logprob of each id; 0.0 for ids that were not sampled."""
        return tuple(chain.from_iterable(entry.logprobs or (0.0,) * len(entry.ids) for entry in self.entries))

    @cached_property
    def versions(self) -> tuple[int | None, ...]:
        """The policy version that sampled each id; None for ids that were not sampled."""
        return tuple(chain.from_iterable(entry.versions for entry in self.entries))

    @property
    def routed_tokens(self) -> int:
        """How many tokens, from the first, have known experts; the last one that was sampled was sent to none yet."""
        ends = zip(self.starts, self.entries, strict=True)
        return max((start + len(entry.ids) - 1 for start, entry in ends if entry.experts is not None), default=0)

    @property
    def experts(self) -> Experts:
        """The experts of each token, -1 for tokens without; empty if nothing is known, or not of which tokens."""
        known, routed, widths = no_experts(), 0, set[float]()
        for start, entry in zip(self.starts, self.entries, strict=True):
            if entry.experts is not None and (end := start + len(entry.ids) - 1) > routed:
                widths.add(len(entry.experts) / (end - routed))
                known, routed = known + entry.experts, end
        width = widths.pop() if len(widths) == 1 else 0.0
        if not width or not width.is_integer():
            return no_experts()
        return known + array("h", (-1,)) * (int(width) * (len(self) - routed))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of each entry's first id."""
        return tuple(accumulate((len(entry.ids) for entry in self.entries[:-1]), initial=0)) if self.entries else ()

    @property
    def expanded(self) -> Ledger:
        """The ledger as the model sees it, with media at full width: what training uses. Itself without media."""
        return self if self._expanded is None else self._expanded

    @cached_property
    def _expanded(self) -> Ledger | None:
        entries = tuple(entry.expanded if entry.widths else entry for entry in self.entries)
        same = all(expanded is entry for expanded, entry in zip(entries, self.entries, strict=True))
        return None if same else Ledger(entries)

    def to_expanded(self, token: int) -> int:
        """Maps an index of this ledger to one of `expanded`; a medium's placeholder to its first token there."""
        index, offset = self._locate(token)
        return self.expanded.starts[index] + _map_offset(offset, self.entries[index], self.expanded.entries[index])

    @cached_property
    def images(self) -> tuple[Image, ...]:
        """The images that have placeholders, as an engine takes them."""
        return tuple(span.medium for span in self.media_spans if isinstance(span.medium, Image))

    @cached_property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        """The media that have placeholders, in order."""
        return tuple(
            MediaSpan(medium, begin + start, begin + stop)
            for begin, entry in zip(self.starts, self.entries, strict=True)
            for medium, (start, stop) in zip(entry.media, entry.spans, strict=False)
            if start < stop
        )

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All chat messages."""
        return tuple(message for entry in self.entries for message in entry.messages)

    @property
    def turns(self) -> Sequence[Entry]:
        """The policy's entries."""
        return [entry for entry in self.entries if entry.author is Author.POLICY]

    @cached_property
    def rewards(self) -> tuple[tuple[float, ...], ...]:
        """For each turn of the policy, the rewards that tools and feedback gave it."""
        rewards: list[list[float]] = []
        for entry in self.entries:
            if entry.author is Author.POLICY:
                rewards.append([])
            elif entry.reward is not None and rewards:
                rewards[-1].append(entry.reward)
        return tuple(map(tuple, rewards))

    @cached_property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all generations: the history counts again in each turn, media at full width."""
        starts = self.expanded.starts
        return sum(start for start, entry in zip(starts, self.entries, strict=True) if entry.author is Author.POLICY)

    @cached_property
    def cached_tokens(self) -> int:
        """The part of `prompt_tokens` that engines read from their prefix cache."""
        return sum(entry.cached_tokens for entry in self.turns)

    def entry_at(self, token: int) -> Entry:
        """The entry that contains the token."""
        return self.entries[self._entry_index(token)]

    def author_at(self, token: int) -> Author:
        """The author of the token."""
        return self.entry_at(token).author

    def turn_at(self, token: int) -> int | None:
        """The number of the policy's turn that contains or precedes the token; None before the first turn."""
        until = self.entries[: self._entry_index(token) + 1]
        turns = sum(entry.author is Author.POLICY for entry in until)
        return turns - 1 if turns else None

    def _locate(self, token: int) -> tuple[int, int]:
        """The index of the token's entry, and the token's offset in it."""
        index = self._entry_index(token)
        return index, token - self.starts[index]

    def _entry_index(self, token: int) -> int:
        if not 0 <= token < len(self):
            raise IndexError(f"there is no token {token}: the ledger has {len(self)} tokens, counted from 0")
        return bisect_right(self.starts, token) - 1


def _map_offset(offset: int, source: Entry, target: Entry) -> int:
    """Maps an offset to the same entry with media of other widths; within a medium, to its first id."""
    shift = 0
    if source is target:
        return offset
    for (start, stop), (_, target_stop) in zip(source.spans, target.spans, strict=True):
        if offset < start:
            break
        if offset < stop:
            return start + shift
        shift = target_stop - stop
    return offset + shift
