"""The state of one request in the embedded engine, and lanes of sequences with the same ids so far."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from trainer.engine.base import EngineError, FinishReason, Generation, OnIds, Sampling
from trainer.engine.torch.sampling import Draw
from trainer.vision.image_processor import PreparedPrompt

Decode = Callable[[Sequence[int]], str]
EMPTY_TEXT_TOKENS = 8
"""How many ids without text, such as special tokens, may stand among those that spell a stop string."""


@dataclass(eq=False, slots=True)
class SequenceState:
    """One request: its prompt, the ids sampled so far, and how it ended."""

    ids: list[int]
    """The prompt, then the sampled ids."""
    sampling: Sampling
    key: str
    version: int
    prepared: PreparedPrompt | None = None
    """The prompt's images, if it has any."""
    on_ids: OnIds | None = None
    """Is given the ids between two bursts of steps."""
    reported: int = 0
    """How many ids it was given."""
    prompt_length: int = 0
    seed: int = 0
    logprobs: list[float] = field(default_factory=list)
    earlier_versions: list[tuple[int, int]] = field(default_factory=list)
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    is_abandoned: bool = False
    """The caller no longer waits."""
    done: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)
        self.seed = secrets.randbits(64) if self.sampling.seed is None else self.sampling.seed

    @property
    def draw(self) -> Draw:
        """How to sample the next id."""
        return Draw(self.sampling, self.seed, len(self.ids))

    @property
    def generation(self) -> Generation:
        """The result; raises if the request failed."""
        if self.error:
            raise EngineError(str(self.error)) from self.error
        return Generation(
            tuple(self.ids[self.prompt_length :]),
            tuple(self.logprobs),
            self.finish_reason or "length",
            self.version,
            self.cached_tokens or 0,
            tuple(self.earlier_versions),
            prompt_tokens=self.prompt_length,
        )

    def report_ids(self) -> None:
        """Gives the caller the ids that were sampled since the last time."""
        new = self.ids[self.prompt_length + self.reported :] if self.on_ids and not self.is_abandoned else ()
        if new and self.on_ids:
            self.reported += len(new)
            self.on_ids(new)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Adds a sampled id."""
        if version != self.version:
            self._change_version(version)
        self.ids.append(token)
        self.logprobs.append(logprob)

    def _change_version(self, version: int) -> None:
        if count := len(self.logprobs) - sum(count for _, count in self.earlier_versions):
            self.earlier_versions.append((self.version, count))
        self.version = version

    def check_finish(self, context_length: int, decode: Decode | None) -> FinishReason | None:
        """The finish reason, if the last id ends the sequence."""
        sampling = self.sampling
        if self.ids[-1] in sampling.stop_ids:
            return "stop"
        if sampling.stop and decode and self._ends_with_stop_string(sampling.stop, decode):
            return "stop"
        if len(self.logprobs) >= sampling.max_tokens or len(self.ids) >= context_length:
            return "length"
        return None

    def _ends_with_stop_string(self, stops: Sequence[str], decode: Decode) -> bool:
        """Decodes only the tail that can spell a stop string: each id has at least a byte, with few exceptions."""
        longest = max(len(stop.encode()) for stop in stops) + EMPTY_TEXT_TOKENS
        text = decode(self.ids[max(self.prompt_length, len(self.ids) - longest) :])
        return any(stop in text for stop in stops)


@dataclass(eq=False, slots=True)
class Lane:
    """Sequences with the same ids so far, often siblings of a group: computed once for all of them."""

    slot: int
    sequences: list[SequenceState]
    cached_length: int = 0
    """The number of ids with keys and values in the slot."""

    @property
    def ids(self) -> list[int]:
        return self.sequences[0].ids

    @property
    def prompt_length(self) -> int:
        return self.sequences[0].prompt_length

    @property
    def is_prefilling(self) -> bool:
        return self.cached_length < self.prompt_length

    @property
    def is_decoding(self) -> bool:
        """It has one sequence, of which only the last id has no keys and values."""
        return len(self.sequences) == 1 and self.cached_length == len(self.ids) - 1

    def split(self, *, whole: bool) -> list[list[SequenceState]]:
        """The unfinished sequences, grouped by the id that each has just sampled, or each for itself if `whole`."""
        parts: dict[object, list[SequenceState]] = {}
        for sequence in self.sequences:
            if not sequence.finish_reason:
                parts.setdefault(sequence if whole else sequence.ids[-1], []).append(sequence)
        return list(parts.values())
