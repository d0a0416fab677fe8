"""ms-swift's loss scales as token weights; in GRPO they only mask tokens. Only the policy's tokens have weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer.algorithms.token_weights import TokenWeightFn, weigh_all_turns
from trainer.ledger import Author, Entry, Ledger

Decode = Callable[[Sequence[int]], str]
EMPTY_THINKING = re.compile(r"(<think>\s*)?</think>\s*")
THINK_PREFIX = re.compile(r"<think>\n?")


def last_round(ledger: Ledger) -> tuple[float, ...]:
    """Weight 1 for the policy's tokens after the last user message."""
    user_entries = [
        index for index, entry in enumerate(ledger) if any(trained.get("role") == "user" for trained in entry.messages)
    ]
    last = user_entries[-1] if user_entries else -1
    is_trained = (index > last and entry.author is Author.POLICY for index, entry in enumerate(ledger))
    return tuple(float(trained) for trained, entry in zip(is_trained, ledger, strict=True) for _ in entry.ids)


@dataclass(frozen=True)
class OverlongFilter:
    """Masks all of a rollout whose last turn was cut off; rewards are compared as before."""

    base: TokenWeightFn

    def __call__(self, ledger: Ledger) -> tuple[float, ...]:
        is_whole = not ledger.turns or ledger.turns[-1].finish_reason != "length"
        return tuple(weight * is_whole for weight in self.base(ledger))


@dataclass(frozen=True)
class MaskedTurnStart:
    """Masks the start of each turn if it matches one of the patterns, such as an empty `<think>` block."""

    base: TokenWeightFn
    starts: tuple[re.Pattern[str], ...]
    words: Decode | None = None

    def with_decoder(self, words: Decode) -> TokenWeightFn:
        return MaskedTurnStart(self.base, self.starts, words)

    def __call__(self, ledger: Ledger) -> tuple[float, ...]:
        return tuple(
            0.0 if is_masked else weight
            for is_masked, weight in zip(self._is_masked(ledger), self.base(ledger), strict=True)
        )

    def _is_masked(self, ledger: Ledger) -> Iterator[bool]:
        for entry in ledger:
            length = self._start_length(entry) if entry.author is Author.POLICY else 0
            yield from (index < length for index in range(len(entry.ids)))

    def _start_length(self, turn: Entry) -> int:
        """The number of ids of the matching start."""
        if self.words is None:
            raise ValueError("there is no tokenizer; use this weight function as `algorithm.credit.trained_turns`")
        text = self.words(turn.ids)
        length = max((match.end() for pattern in self.starts if (match := pattern.match(text))), default=0)
        return next((count for count in range(len(turn.ids) + 1) if len(self.words(turn.ids[:count])) >= length), 0)


default_overlong_filter = OverlongFilter(weigh_all_turns)
last_round_overlong_filter = OverlongFilter(last_round)
default_ignore_empty_think = MaskedTurnStart(weigh_all_turns, (EMPTY_THINKING,))
default_ignore_think_prefix = MaskedTurnStart(weigh_all_turns, (THINK_PREFIX,))
default_ignore_empty_think_ignore_think_prefix = MaskedTurnStart(weigh_all_turns, (EMPTY_THINKING, THINK_PREFIX))
last_round_ignore_empty_think = MaskedTurnStart(last_round, (EMPTY_THINKING,))
last_round_ignore_think_prefix = MaskedTurnStart(last_round, (THINK_PREFIX,))
last_round_ignore_empty_think_ignore_think_prefix = MaskedTurnStart(last_round, (EMPTY_THINKING, THINK_PREFIX))
