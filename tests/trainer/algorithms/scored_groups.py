"""Scored groups for tests: a rollout is a string with a letter for each token, by its author."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hypothesis import strategies as st

from trainer.ledger import Author, Entry, Ledger
from trainer.reward.scorer import ScoredGroup, ScoredRollout
from trainer.rollout.rollout import Rollout, StopReason
from trainer.rollout.task import Task

AUTHORS = {"q": Author.TASK, "t": Author.TOOL, "f": Author.FEEDBACK}


def ledger(letters: str) -> Ledger:
    """`qqaattab`: a task of two tokens, a turn of two `a`, two tokens of a tool, a turn of `a`, and a turn of `b`."""
    entries = []
    for letter, run in groupby(letters):
        ids = tuple(range(7, 7 + len(list(run))))
        author = AUTHORS.get(letter, Author.POLICY)
        logprobs = tuple(-token / 8 for token in ids) if author is Author.POLICY else None
        entries.append(Entry(author, ids, logprobs=logprobs))
    return Ledger(tuple(entries))


def scored(
    letters: str, reward: float = 0.0, turns: Sequence[float] | None = None, *, index: int = 0, group: str = "1-0"
) -> ScoredRollout:
    """A scored rollout. `|` separates ledgers; the scores of turns are part of the reward."""
    *earlier, last = map(ledger, letters.split("|"))
    rollout = Rollout("sum", last, StopReason.DONE, group=group, index=index, earlier=tuple(earlier))
    count = sum(len(part.turns) for part in (*earlier, last))
    scores = tuple(turns if turns is not None else (0.0,) * count)
    return ScoredRollout(rollout, {"right": reward}, reward, scores, reward > 0, sum(scores))


def group(*rollouts: ScoredRollout) -> ScoredGroup:
    return ScoredGroup(Task("sum", ()), rollouts)


def outcomes(*rewards: float, letters: str = "qqaataa") -> ScoredGroup:
    """A group of rollouts that differ only in their rewards."""
    return group(*(scored(letters, reward, index=index) for index, reward in enumerate(rewards)))


ROLLOUTS = ["qa", "qqaatb", "qaatbbfc", "qa|qqb", "qatb|qqqcc|qa", "qabtc"]


@st.composite
def groups(draw: st.DrawFn) -> ScoredGroup:
    """Draws a group."""
    rollouts = []
    for index in range(draw(st.integers(1, 4))):
        letters = draw(st.sampled_from(ROLLOUTS))
        count = sum(len(ledger(part).turns) for part in letters.split("|"))
        turns = draw(st.lists(st.sampled_from([0.0, 0.1, -0.5]), min_size=count, max_size=count))
        reward = draw(st.sampled_from([0.0, 1.0, 0.3])) + sum(turns)
        rollouts.append(scored(letters, reward, turns, index=index, group=draw(st.sampled_from(["1-0", "1-1"]))))
    return group(*rollouts)
