"""ms-swift's loss scales, as weights of tokens: in GRPO they mask, and so they do here. What a policy did not write has
none in any case."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer.learn.rounds import Weigh, every
from trainer.ledger import Author, Entry, Ledger

Words = Callable[[Sequence[int]], str]
EMPTY = re.compile(r"(<think>\s*)?</think>\s*")
PREFIX = re.compile(r"<think>\n?")


def last_round(ledger: Ledger) -> tuple[float, ...]:
    """All that the policy wrote after the last word of a user's, in however many turns."""
    asked = [place for place, entry in enumerate(ledger) if any(one.get("role") == "user" for one in entry.messages)]
    last = asked[-1] if asked else -1
    mine = (place > last and entry.author is Author.POLICY for place, entry in enumerate(ledger))
    return tuple(float(one) for one, entry in zip(mine, ledger, strict=True) for _ in entry.ids)


@dataclass(frozen=True)
class Unthought:
    """Without what opens a turn that thinks nothing, or thinks at all: it needs to know what ids say."""

    base: Weigh
    opens: tuple[re.Pattern[str], ...]
    words: Words | None = None

    def reading(self, words: Words) -> Weigh:
        return Unthought(self.base, self.opens, words)

    def __call__(self, ledger: Ledger) -> tuple[float, ...]:
        return tuple(0.0 if left else one for left, one in zip(self._left(ledger), self.base(ledger), strict=True))

    def _left(self, ledger: Ledger) -> Iterator[bool]:
        for entry in ledger:
            wide = self._opening(entry) if entry.author is Author.POLICY else 0
            yield from (place < wide for place in range(len(entry.ids)))

    def _opening(self, turn: Entry) -> int:
        """How many ids say it."""
        if self.words is None:
            raise ValueError("nobody said what ids mean; name it as `algorithm.credit.rounds`")
        said = self.words(turn.ids)
        wide = max((found.end() for one in self.opens if (found := one.match(said))), default=0)
        return next((at for at in range(len(turn.ids) + 1) if len(self.words(turn.ids[:at])) >= wide), 0)


default_ignore_empty_think = Unthought(every, (EMPTY,))
default_ignore_think_prefix = Unthought(every, (PREFIX,))
default_ignore_empty_think_ignore_think_prefix = Unthought(every, (EMPTY, PREFIX))
last_round_ignore_empty_think = Unthought(last_round, (EMPTY,))
last_round_ignore_think_prefix = Unthought(last_round, (PREFIX,))
last_round_ignore_empty_think_ignore_think_prefix = Unthought(last_round, (EMPTY, PREFIX))
