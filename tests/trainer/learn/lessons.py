"""Scored groups from a few words: rollouts are written as letters, one for each token, by who wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hypothesis import strategies as st

from trainer.ledger import Author, Entry, Ledger
from trainer.reward.scored import Scored, ScoredGroup
from trainer.run.rollout import Rollout, StopReason
from trainer.task import Task

AUTHORS = {"q": Author.TASK, "t": Author.TOOL, "f": Author.FEEDBACK}


def ledger(written: str) -> Ledger:
    """`qqaattab`: asked with two tokens, a turn of two `a`, a tool's two, a turn of `a`, and one of `b`."""
    entries = []
    for letter, run in groupby(written):
        ids = tuple(range(7, 7 + len(list(run))))
        author = AUTHORS.get(letter, Author.POLICY)
        logprobs = tuple(-token / 8 for token in ids) if author is Author.POLICY else None
        entries.append(Entry(author, ids, logprobs=logprobs))
    return Ledger(tuple(entries))


def scored(
    written: str, reward: float = 0.0, turns: Sequence[float] | None = None, *, index: int = 0, group: str = "1-0"
) -> Scored:
    """Ledgers are parted by `|`; what turns scored is part of the reward."""
    *earlier, last = map(ledger, written.split("|"))
    rollout = Rollout("sum", last, StopReason.DONE, group=group, index=index, earlier=tuple(earlier))
    count = sum(len(one.turns) for one in (*earlier, last))
    told = tuple(turns if turns is not None else (0.0,) * count)
    return Scored(rollout, {"right": reward}, reward, told, reward > 0, sum(told))


def group(*rollouts: Scored) -> ScoredGroup:
    return ScoredGroup(Task("sum", ()), rollouts)


def outcomes(*rewards: float, written: str = "qqaataa") -> ScoredGroup:
    """Rollouts alike but for what they are worth."""
    return group(*(scored(written, reward, index=index) for index, reward in enumerate(rewards)))


WRITTEN = ["qa", "qqaatb", "qaatbbfc", "qa|qqb", "qatb|qqqcc|qa", "qabtc"]


@st.composite
def groups(draw: st.DrawFn) -> ScoredGroup:
    rollouts = []
    for index in range(draw(st.integers(1, 4))):
        written = draw(st.sampled_from(WRITTEN))
        count = sum(len(ledger(one).turns) for one in written.split("|"))
        turns = draw(st.lists(st.sampled_from([0.0, 0.1, -0.5]), min_size=count, max_size=count))
        reward = draw(st.sampled_from([0.0, 1.0, 0.3])) + sum(turns)
        rollouts.append(scored(written, reward, turns, index=index, group=draw(st.sampled_from(["1-0", "1-1"]))))
    return group(*rollouts)
