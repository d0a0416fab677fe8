"""Explains a token: who wrote it, under which policy version, and why it is trained or not, with its credit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.ledger import BRANCH, Author, Entry, Ledger
from trainer.rollout.rollout import EXCLUDED_SPANS, Rollout
from trainer.storage.token_credit import CreditReader, CreditSpan, get_step
from trainer.view.text import Decode, format_rewards, to_line


@dataclass(frozen=True, slots=True)
class RolloutCredit:
    """The credit that a train step gave to a rollout, or the reason why no step trained on it."""

    ledgers: tuple[Sequence[CreditSpan], ...] = ()
    """For each ledger, over expanded tokens; empty for a ledger without policy tokens."""
    untrained_reason: str = ""
    """Empty if the rollout was trained, or if it is unknown."""

    @classmethod
    def load(cls, rollout: Rollout, credits: CreditReader) -> RolloutCredit:
        spans = credits.read_rollout(rollout)
        if spans is None:
            return cls(untrained_reason=_explain_untrained_rollout(rollout, credits))
        remaining = iter(spans)
        return cls(tuple(next(remaining, ()) if any(ledger.mask) else () for ledger in rollout.ledgers))

    def expand(self, ledger: int) -> list[CreditSpan]:
        """The credit of each expanded token of a ledger; empty if it is unknown."""
        spans = self.ledgers[ledger] if self.ledgers else ()
        return [(1, advantage, weight) for count, advantage, weight in spans for _ in range(count)]


UNKNOWN_CREDIT = RolloutCredit()


def _explain_untrained_rollout(rollout: Rollout, credits: CreditReader) -> str:
    step, steps = get_step(rollout), credits.steps
    if step is None or not steps or not any(turn.ids for turn in rollout.turns):
        return ""
    if not step:
        return (
            "no step trained on its group: it was too stale (`max_staleness`), had no signal"
            " (`algorithm.dynamic_sampling`), or came too late"
        )
    if step > max(steps):
        return f"step {step}, for which it was collected, has not trained on it yet"
    if step in steps:
        replaced = "had no signal and was replaced (`algorithm.dynamic_sampling`)"
        return f"step {step} did not train on its group, which {replaced}"
    return ""


CONTEXT_TOKENS = 12
"""Tokens shown before and after the token."""


@dataclass(frozen=True, slots=True)
class TokenReport:
    """All that is known about one token. Its text and context are None without a tokenizer."""

    rollout: int
    token: int
    id: int
    author: Author
    source: str
    turn: int | None
    """The policy turn that wrote it or that it answers, from 0; None in the prompt."""
    version: int | None
    logprob: float | None
    reused: int
    """The later requests for which it was in the prefix cache."""
    requests: int
    """The later requests whose prompt has it."""
    trained: bool
    reason: str
    advantage: float | None = None
    """Its advantage in its train step, if it is known."""
    media: str = ""
    """A description of the image, audio or video that it stands for."""
    text: str | None = None
    before: str | None = None
    after: str | None = None

    def __str__(self) -> str:
        return "\n".join(_format_lines(self))


def explain_token(
    run: Sequence[Rollout],
    rollout: int,
    token: int,
    decode: Decode | None = None,
    credited: RolloutCredit = UNKNOWN_CREDIT,
    ledger: int = -1,
) -> TokenReport:
    """The report on a token of one of the rollout's ledgers, by default the last.

    Raises IndexError if there is no such rollout, ledger or token.
    """
    shown = run[rollout]
    index = _ledger_index(shown, ledger)
    tokens = shown.ledgers[index]
    entry, turn = tokens.entry_at(token), tokens.turn_at(token)
    credits = credited.expand(index)[tokens.to_expanded(token) :] if entry.author is Author.POLICY else ()
    credit = next(iter(credits), None)
    offset = token - max(start for start in tokens.starts if start <= token)
    answers = () if turn is None else tokens.rewards[turn]
    trained, reason = explain_training(shown, entry, answers, credit, credited.untrained_reason, [offset])
    hits = [
        later.cached_tokens > tokens.to_expanded(token)
        for start, later in zip(tokens.starts, tokens, strict=True)
        if later.author is Author.POLICY and start > token
    ]
    return TokenReport(
        rollout=rollout,
        token=token,
        id=tokens.ids[token],
        author=entry.author,
        source=entry.source,
        turn=None if turn is None else turn + sum(len(before.turns) for before in shown.ledgers[:index]),
        version=tokens.versions[token],
        logprob=tokens.logprobs[token] if entry.author is Author.POLICY else None,
        reused=sum(hits),
        requests=len(hits),
        trained=trained,
        reason=reason,
        advantage=credit[1] if credit else None,
        media=_describe_media(tokens, token),
        text=decode([tokens.ids[token]]) if decode else None,
        before=decode(tokens.ids[max(0, token - CONTEXT_TOKENS) : token]) if decode else None,
        after=decode(tokens.ids[token + 1 : token + 1 + CONTEXT_TOKENS]) if decode else None,
    )


def _ledger_index(rollout: Rollout, ledger: int) -> int:
    count = len(rollout.ledgers)
    if not -count <= ledger < count:
        raise IndexError(f"rollout {rollout.name} has {count} ledgers, counted from 0: there is no ledger {ledger}")
    return ledger % count


def _describe_media(ledger: Ledger, token: int) -> str:
    for number, (placeholder, expanded) in enumerate(
        zip(ledger.media_spans, ledger.expanded.media_spans, strict=True), 1
    ):
        if placeholder.start <= token < placeholder.stop:
            kind, count = type(placeholder.medium).__name__.lower(), expanded.stop - expanded.start
            medium = placeholder.medium
            return f"{kind} {number} ({medium.mime}, {len(medium.data):,} bytes), expanded to {count} tokens"
    return ""


def explain_training(
    rollout: Rollout,
    entry: Entry,
    answers: Sequence[float] = (),
    credit: CreditSpan | None = None,
    untrained_reason: str = "",
    offsets: Sequence[int] | None = None,
) -> tuple[bool, str]:
    """Whether an entry's tokens (all, or those at `places` within it) are trained, and why.

    `answers` are the rewards of tools and users for its turn, `nothing` is the reason if no step trained the rollout.
    """
    if entry.author is not Author.POLICY:
        return False, _explain_other_author(entry)
    if rollout.stop.is_infrastructure:
        reason = f" ({rollout.reason})" if rollout.reason else ""
        return False, f"the policy wrote it, but an infrastructure failure ended the rollout: {rollout.stop}{reason}"
    if rollout.reward is None:
        return False, "the policy wrote it, but the rollout was not scored"
    if untrained_reason:
        return False, f"the policy wrote it, but {untrained_reason}"
    if credit is not None and not credit[2]:
        return False, explain_zero_weight(entry, range(len(entry.ids)) if offsets is None else offsets)
    answered = f"; its turn got {', '.join(f'{value:g}' for value in answers)}" if answers else ""
    reward = f"the rollout's reward {rollout.reward:.4g} ({format_rewards(rollout)}){answered}"
    if credit is not None and not credit[1]:
        reason = f"the policy wrote it, and it is trained with {reward}"
        return True, f"{reason}; its advantage is 0, since its group has equal rewards"
    trained = "it will be trained" if credit is None else "it is trained"
    return True, f"the policy wrote it, and {trained} with {reward}"


def _explain_other_author(entry: Entry) -> str:
    """Why tokens that the policy did not write here are not trained."""
    source = f" {entry.source!r}" if entry.source else ""
    if entry.source == BRANCH:
        return "the policy wrote it in another branch of the rollout, and it is trained there"
    if entry.source == "agent" and entry.author is Author.TASK:
        return "the agent wrote it, and only the policy's tokens are trained"
    writers = {Author.TASK: f"it is from the task{source}", Author.TOOL: f"the tool{source} wrote it"}
    return f"{writers.get(entry.author, f'feedback{source} wrote it')}, and only the policy's tokens are trained"


def explain_zero_weight(entry: Entry, offsets: Sequence[int]) -> str:
    """Why tokens of a policy turn, at these places within it, have weight 0."""
    spans = [(start, stop) for start, stop in entry.info.get(EXCLUDED_SPANS, ())]
    excluded = [any(start <= offset < stop for start, stop in spans) for offset in offsets]
    if not any(excluded):
        return "the policy wrote it, but `algorithm.credit.trained_turns` gives it no weight"
    if all(excluded):
        return "the policy wrote it, but a plug-in excluded it from training"
    ranges = ", ".join(f"{start}-{stop - 1}" for start, stop in spans if start < stop)
    return (
        f"the policy wrote it, but a plug-in excluded it from training (tokens {ranges} of the turn, from 0), or"
        " `algorithm.credit.trained_turns` gives it no weight (the others)"
    )


def _format_lines(report: TokenReport) -> list[str]:
    lines = [f"token {report.token} of rollout {report.rollout}: id {report.id}"]
    if report.text is not None:
        lines[0] += f", text '{to_line(report.text)}'"
        lines.append(
            f"  within      {to_line(report.before or '')}»{to_line(report.text)}«{to_line(report.after or '')}"
        )
    if report.media:
        lines.append(f"  stands for  {to_line(report.media)}")
    turn = "before the first turn" if report.turn is None else f"turn {report.turn}"
    lines.append(f"  written by  {report.author}{f' {to_line(report.source)}' if report.source else ''}, {turn}")
    if report.author is Author.POLICY:
        version = "an unknown version" if report.version is None else f"version {report.version}"
        lines.append(f"  sampled     under {version}, logprob {report.logprob:.6g}")
    if report.advantage is not None:
        lines.append(f"  advantage   {report.advantage:+.6g}")
    cached = "no later request has it in its prompt"
    if report.requests:
        cached = f"for {report.reused} of {report.requests} later requests"
    lines.append(f"  cached      {cached}")
    lines.append(f"  {'trained     ' if report.trained else 'not trained '}{to_line(report.reason)}")
    return lines
