"""Counts what the engine sampled for an agent, and compares each prompt with the ids that were sampled before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class SampledTokens:
    """The tokens of one rollout, counted where the engine returns them and not where they are recorded."""

    count: int = 0
    discarded: int = 0
    """Tokens of turns that were not recorded, since the engine aborted them or counted another prompt."""
    retokenised: int = 0
    """Prompts whose beginning, up to the policy's latest turn, is not what the engine read and sampled before."""
    _known: set[int] = field(default_factory=set)

    def check_prompt(self, known: tuple[int, ...]) -> None:
        """Compares the beginning of a prompt, up to the end of a turn, with what went through the engine."""
        if known and hash(known) not in self._known:
            self.retokenised += 1

    def discard(self, count: int) -> None:
        """Counts tokens of a turn that was given up while it was written."""
        self.count += count
        self.discarded += count

    @contextmanager
    def recording(self, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Iterator[None]:
        """Counts a turn while it is recorded; if that fails, its tokens are discarded."""
        self.count += len(ids)
        try:
            yield
        except BaseException:
            self.discarded += len(ids)
            raise
        self._known.add(hash((*prompt, *ids)))
