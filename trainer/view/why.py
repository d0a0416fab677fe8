"""Why a token is trained or not is read off the ledger: it was decided when somebody wrote it, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.ledger import Author, Entry, Ledger
from trainer.run.credits import Credit
from trainer.run.rollout import LEFT_OUT, Rollout
from trainer.view.credited import UNKNOWN, Credited
from trainer.view.text import Decode, line, parts

AROUND = 12
"""So many tokens on each side make a line of surroundings."""


@dataclass(frozen=True, slots=True)
class Why:
    """All that is known of one token. Its text and surroundings are None without a tokenizer."""

    rollout: int
    token: int
    id: int
    author: Author
    source: str
    turn: int | None
    """The policy's turn that wrote it or that it answers, counted from 0; None for what the task opens with."""
    version: int | None
    logprob: float | None
    reused: int
    """How many later requests found it at hand,"""
    requests: int
    """of how many that began with it."""
    trained: bool
    because: str
    advantage: float | None = None
    """What its step made of it, where that is known."""
    shows: str = ""
    """The medium that it stands for."""
    text: str | None = None
    before: str | None = None
    after: str | None = None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def why(
    run: Sequence[Rollout],
    rollout: int,
    token: int,
    decode: Decode | None = None,
    credited: Credited = UNKNOWN,
    ledger: int = -1,
) -> Why:
    """Of the token at this place in one of the rollout's ledgers, by default the last. Raises IndexError where there is
    no such rollout, ledger or token."""
    told = run[rollout]
    place = _place(told, ledger)
    own = told.ledgers[place]
    entry, turn = own.entry_at(token), own.turn_of(token)
    credit = _credit(credited, place, own.widened(token)) if entry.author is Author.POLICY else None
    within = token - max(start for start in own.starts if start <= token)
    answers = () if turn is None else own.rewards[turn]
    trained, reason = because(told, entry, answers, credit, credited.nothing, [within])
    ahead = [
        later.cached > own.widened(token)
        for start, later in zip(own.starts, own, strict=True)
        if later.author is Author.POLICY and start > token
    ]
    return Why(
        rollout=rollout,
        token=token,
        id=own.ids[token],
        author=entry.author,
        source=entry.source,
        turn=None if turn is None else turn + sum(len(before.turns) for before in told.ledgers[:place]),
        version=own.versions[token],
        logprob=own.logprobs[token] if entry.author is Author.POLICY else None,
        reused=sum(ahead),
        requests=len(ahead),
        trained=trained,
        because=reason,
        advantage=credit[1] if credit else None,
        shows=_shows(own, token),
        text=decode([own.ids[token]]) if decode else None,
        before=decode(own.ids[max(0, token - AROUND) : token]) if decode else None,
        after=decode(own.ids[token + 1 : token + 1 + AROUND]) if decode else None,
    )


def _place(rollout: Rollout, ledger: int) -> int:
    count = len(rollout.ledgers)
    if not -count <= ledger < count:
        raise IndexError(f"rollout {rollout.name} has {count} ledgers, counted from 0, and no ledger {ledger}")
    return ledger % count


def _shows(ledger: Ledger, token: int) -> str:
    for number, (place, wide) in enumerate(zip(ledger.places, ledger.expanded.places, strict=True), 1):
        if place.start <= token < place.stop:
            kind, seen = type(place.medium).__name__.lower(), wide.stop - wide.start
            return f"{kind} {number} ({place.medium.mime}, {len(place.medium.data):,} bytes), seen as {seen} tokens"
    return ""


def _credit(credited: Credited, ledger: int, token: int) -> Credit | None:
    return next(iter(credited.tokens(ledger)[token : token + 1]), None)


def because(
    rollout: Rollout,
    entry: Entry,
    answers: Sequence[float] = (),
    credit: Credit | None = None,
    nothing: str = "",
    places: Sequence[int] | None = None,
) -> tuple[bool, str]:
    """Whether an entry's tokens are trained, and why: all of them, or those at `places` within it.

    `answers` are the scores that its turn was answered with, `nothing` why no step learned from the rollout.
    """
    source = f" {entry.source!r}" if entry.source else ""
    match entry.author:
        case Author.TASK:
            return False, f"the task{source} put it there, and only what the policy wrote is trained"
        case Author.TOOL:
            return False, f"the tool{source} wrote it, and only what the policy wrote is trained"
        case Author.FEEDBACK:
            return False, f"feedback{source} wrote it, and only what the policy wrote is trained"
    if rollout.stop.infrastructure:
        reason = f" ({rollout.reason})" if rollout.reason else ""
        return False, f"the policy wrote it, but is not to blame for how the rollout ended: {rollout.stop}{reason}"
    if rollout.reward is None:
        return False, "the policy wrote it, but the rollout was not scored"
    if nothing:
        return False, f"the policy wrote it, but {nothing}"
    if credit is not None and not credit[2]:
        return False, weightless(entry, range(len(entry.ids)) if places is None else places)
    worth = _worth(rollout, answers)
    if credit is not None and not credit[1]:
        return (
            True,
            f"the policy wrote it, and it counts with {worth}; but siblings earned the same, so it moves nothing",
        )
    counts = "a step that learns from it counts it" if credit is None else "it counts"
    return True, f"the policy wrote it, and {counts} with {worth}"


def weightless(entry: Entry, places: Sequence[int]) -> str:
    """Why tokens of the policy's turn, at these places within it, have no weight."""
    spans = [(start, stop) for start, stop in entry.info.get(LEFT_OUT, ())]
    left = [any(start <= place < stop for start, stop in spans) for place in places]
    if not any(left):
        return "the policy wrote it, but `algorithm.credit.rounds` gives it no weight"
    if all(left):
        return "the policy wrote it, but a plug-in left it out of what is learned"
    told = ", ".join(f"{start}-{stop - 1}" for start, stop in spans if start < stop)
    return (
        f"the policy wrote it, but a plug-in left it out of what is learned (tokens {told} of the turn, from 0), or"
        " `algorithm.credit.rounds` gives it no weight (the others)"
    )


def _worth(rollout: Rollout, answers: Sequence[float]) -> str:
    answered = f"; its turn was answered with {', '.join(f'{value:g}' for value in answers)}" if answers else ""
    return f"the rollout's reward {rollout.reward:.4g} ({parts(rollout)}){answered}"


def _lines(told: Why) -> list[str]:
    lines = [f"token {told.token} of rollout {told.rollout}: id {told.id}"]
    if told.text is not None:
        lines[0] += f", text '{line(told.text)}'"
        lines.append(f"  within      {line(told.before or '')}»{line(told.text)}«{line(told.after or '')}")
    if told.shows:
        lines.append(f"  stands for  {line(told.shows)}")
    turn = "before the first turn" if told.turn is None else f"turn {told.turn}"
    lines.append(f"  written by  {told.author}{f' {line(told.source)}' if told.source else ''}, {turn}")
    if told.author is Author.POLICY:
        version = "an unknown version" if told.version is None else f"version {told.version}"
        lines.append(f"  sampled     under {version}, logprob {told.logprob:.6g}")
    if told.advantage is not None:
        lines.append(f"  advantage   {told.advantage:+.6g}")
    again = "it begins no later request"
    if told.requests:
        again = f"at hand for {told.reused} of the {told.requests} requests that begin with it"
    lines.append(f"  cached      {again}")
    lines.append(f"  {'trained     ' if told.trained else 'not trained '}{line(told.because)}")
    return lines
