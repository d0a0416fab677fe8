"""What goes wrong in training is quiet: an alarm says what is seen, what it likely means, and what to turn.

Alarms are told and decide nothing. Each speaks once, and again only after all was well for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, sqrt

from gateway.types import Outcome
from trainer.ledger import NOTHING
from trainer.run.rollout import StopReason

Metrics = Mapping[str, float]

REMEMBERED = 200
"""Steps that are looked back on."""
WELL = 5
"""Looks without a sign, until an alarm may speak again: what flickers is one trouble and not many."""
START = 5
"""Steps whose mean stands for how it began."""
EASY, HARD = 0.95, 0.05
"""Success beyond which groups are alike because all is right, or all is wrong."""
CUT = 0.9
"""Share of rollouts that ended at a limit."""
LATELY, MORE = 30, 0.1
"""Steps over which shares are compared, and the rise of one that is a trend."""
OUTCOMES, TOOLS = "engine/outcomes/", "engine/tools/"
FAILED = ("error", "timeout", "unavailable", "unknown")
FAILING, FEW = 0.3, 20
"""Share of the calls of a step, of one tool or of all, and of fewer calls nothing is said."""
CERTAIN, FALLEN = 0.02, 0.1
"""Entropy that leaves nothing to try: nats a token, and the share of what it was."""
LOOKS = 3
"""Evaluations after the first, before the reward's rise and theirs are compared."""
RISE = 0.03
"""Greedy success that counts as a gain; less is luck of the draw."""
SURE = 3.0
"""Standard errors by which the reward has to have risen."""
DRIFT, MOVED, OFF = 0.01, 0.1, 10.0
"""Nats a token: engine from trainer, new policy from the one that wrote, policy from its reference."""
LOST = 0.2
"""Share of rollouts that infrastructure ended."""
BITES, BITTEN = 5, 0.1
"""Steps in a row that dropped what was too stale, and the share of all that they came by."""

KNOBS = {
    StopReason.LENGTH_TURN: "limits.turn_tokens",
    StopReason.LENGTH_ROLLOUT: "limits.rollout_tokens",
    StopReason.ASSISTANT_TURNS: "limits.assistant_turns",
    StopReason.TOOL_CALLS: "limits.tool_calls",
}
"""Limits that cut off what goes on; a limit on feedback's turns is how a rollout ends well."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What an alarm judges by."""

    now: Metrics
    past: Sequence[Metrics] = ()
    """Oldest first, `now` the last of them."""
    start: Sequence[Metrics] = ()
    """The run's first steps."""
    reasons: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Why rollouts were lost, and how many for each reason."""


def nothing_to_compare(looked: Looked) -> str | None:
    if looked.now.get("groups/teaching") != 0:
        return None
    success = _known(looked.now, "success/sampled")
    means = "whether one succeeds depends on the task and hardly on the attempt"
    remedy = "try each task more often (`n`), or leave `sampling.temperature` at 1"
    if success is not None and success >= EASY:
        means = f"{success:.0%} succeed: the tasks have become too easy"
        remedy = "end here, or give harder tasks (`data`, `curriculum`)"
    elif success is not None and success <= HARD:
        means = f"{success:.0%} succeed: the tasks are too hard as yet"
        remedy = (
            "begin with easier tasks (`curriculum`) or a better start (`model`), try each more often (`n`), or let"
            " `reward` pay for what is half right"
        )
    return _said("no group teaches: within each, all rewards are the same, and the step changed nothing", means, remedy)


def all_cut_off(looked: Looked) -> str | None:
    shares = {stop: _known(looked.now, f"stops/{stop}") or 0.0 for stop in KNOBS}
    if (_known(looked.now, "rollout/turns") or 0.0) <= 1:
        shares[StopReason.ASSISTANT_TURNS] = 0.0  # One turn is all that was asked for.
    if sum(shares.values()) < CUT:
        return None
    commonest = max(shares, key=lambda stop: shares[stop])
    return _said(
        f"{sum(shares.values()):.0%} of the rollouts are cut off, {shares[commonest]:.0%} by {commonest}",
        "the limit is too low for the task, or the policy has forgotten how to stop; what was never finished is scored"
        " all the same, and its reward says little",
        f"raise `{KNOBS[commonest]}`; if lengths grew from step to step, lower `update.lr`, or let length cost"
        " something (`algorithm.overlong`)",
    )


def cut_off_more(looked: Looked) -> str | None:
    risen = _risen(list(looked.past)[-LATELY:], "rollout/truncated")
    if risen is None or risen[1] - risen[0] < MORE:
        return None
    return _said(
        f"more and more rollouts are cut off at a limit of tokens: {risen[0]:.0%} before, {risen[1]:.0%} of late",
        "the policy writes longer from step to step, or forgets how to stop; what was never finished is scored all the"
        " same",
        "read some (`mtrl-train view`); raise `limits.rollout_tokens` where length helps, or let length cost something"
        " (`algorithm.overlong`)",
    )


def tools_fail(looked: Looked) -> str | None:
    """The tool that fails most; all together where none of them was called often enough."""
    named = [(f" of `{name}`", ends) for name, ends in _ends(looked.now)]
    failing = [one for one in named if _failing(one[1])] or [("", _outcomes(looked.now, OUTCOMES))]
    of, ends = max(failing, key=lambda one: _failed(one[1]) / max(1.0, fsum(one[1].values())))
    if not _failing(ends):
        return None
    calls, worst = fsum(ends.values()), max(FAILED, key=lambda outcome: ends.get(outcome, 0.0))
    return _said(
        f"{_failed(ends) / calls:.0%} of the answers to calls{of} are failures, {ends[worst]:,.0f} of {calls:,.0f}"
        f" answers are `{worst}`",
        "a tool breaks on what it is asked, or its server is down, or too slow for so many at once; the policy learns"
        " to do without it",
        "read such calls (`mtrl-train view`, by outcome), and mend the tool, or give it more time (`timeout_s`)",
    )


def _ends(metrics: Metrics) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each tool, how its calls ended."""
    names = {name.removeprefix(TOOLS).rpartition("/")[0] for name in metrics if name.startswith(TOOLS)}
    return ((name, _outcomes(metrics, f"{TOOLS}{name}/")) for name in sorted(names))


def _outcomes(metrics: Metrics, area: str) -> dict[str, float]:
    return {one: value for one in Outcome if (value := _known(metrics, area + one)) is not None}


def _failed(ends: Mapping[str, float]) -> float:
    return fsum(ends.get(outcome, 0.0) for outcome in FAILED)


def _failing(ends: Mapping[str, float]) -> bool:
    calls = fsum(ends.values())
    return calls >= FEW and _failed(ends) >= FAILING * calls


def entropy_gone(looked: Looked) -> str | None:
    entropy, before = _known(looked.now, "entropy"), _mean(looked.start, "entropy")
    success = _known(looked.now, "success/sampled") or 0.0
    if entropy is None or before is None or success >= EASY:
        return None
    if entropy >= CERTAIN or entropy >= FALLEN * before:
        return None
    return _said(
        f"entropy is gone: {entropy:.2g} nats a token, {before:.2g} at the start, while {success:.0%} succeed",
        "the policy writes the same again and again and tries nothing new, so that there is little left to learn from",
        "begin again, or from an earlier checkpoint, with a lower `update.lr`, a higher `algorithm.clip_high`, or some"
        " `algorithm.kl.coefficient`",
    )


def better_on_paper(looked: Looked) -> str | None:
    """The reward rose since an evaluation some time ago, and what evaluations find did not."""
    places = [place for place, one in enumerate(looked.past) if _known(one, "eval/greedy") is not None]
    if len(places) <= LOOKS:
        return None
    since = list(looked.past)[places[-1 - LOOKS] : places[-1] + 1]
    before, now = since[0]["eval/greedy"], since[-1]["eval/greedy"]
    risen = _risen(since[1:], "reward/mean")
    if risen is None or now - before >= RISE or now >= EASY:
        return None
    seen = (
        f"the reward rose from {risen[0]:.3g} to {risen[1]:.3g} over the last {LOOKS} evaluations, and greedy success"
        f" on their tasks did not: {before:.0%} then, {now:.0%} now"
    )
    if _risen(since[1:], "success/sampled"):
        return _said(
            seen,
            "sampled success rose too, so the policy grows surer of what it could do already, as a lower temperature"
            " would make it, or it learns the training tasks by heart",
            "give more varied tasks (`data`), raise `algorithm.clip_high`, and do not believe the reward alone",
        )
    return _said(
        seen,
        "sampled success did not rise either, so the policy earns its reward by something else than the task",
        "read rollouts (`mtrl-train show`) to see what is paid for, and mend or weigh down that component of `reward`",
    )


def far_apart(looked: Looked) -> str | None:
    mismatch = _known(looked.now, "mismatch/kl")
    if mismatch is None or mismatch < DRIFT:
        return None
    return _said(
        f"engine and trainer disagree on what was written: mismatch/kl is {mismatch:.2g} nats a token",
        "the policy that writes is not the one that learns: other weights, other precision, or a sampling filter",
        "see that each step's weights reach the engine, and leave `sampling` at its defaults; until then set"
        " `algorithm.mismatch.truncate: token`",
    )


def moved_far(looked: Looked) -> str | None:
    old, reference = _known(looked.now, "kl/old") or 0.0, _known(looked.now, "kl/reference") or 0.0
    if old >= MOVED and _known(looked.now, "staleness/max"):
        return _said(
            f"the policy is far from those that wrote what it learns from: kl/old is {old:.2g} nats a token",
            "versions are so different that most ratios are clipped, and what was written teaches little",
            "lower `max_staleness` or `update.lr`",
        )
    if old >= MOVED:
        return _said(
            f"one step moves the policy far: kl/old is {old:.2g} nats a token",
            "the step is too large: what was written no longer tells how the new policy writes",
            "lower `update.lr` or `update.clip`",
        )
    if reference >= OFF:
        return _said(
            f"the policy has left its reference far behind: kl/reference is {reference:.2g} nats a token",
            "it found a way to be rewarded for what nobody would write",
            "read rollouts (`mtrl-train show`); raise `algorithm.kl.coefficient`, or lower `update.lr`",
        )
    return None


def many_lost(looked: Looked) -> str | None:
    lost, counted = _known(looked.now, "rollout/lost") or 0.0, _known(looked.now, "rollout/count") or 0.0
    if not lost or lost < LOST * (lost + counted):
        return None
    reason, count = max(looked.reasons.items(), key=lambda item: item[1], default=("", 0))
    named = f", {count:,} of them by: {reason.rstrip('.')}" if reason else ""
    if reason.startswith("component "):
        return _said(
            f"{lost:,.0f} of {lost + counted:,.0f} rollouts have no reward{named}",
            "a reward function fails on them; they are left out, and those that are left may be the easy ones",
            "mend that function of `reward`, so that it gives a number for every rollout",
        )
    return _said(
        f"{lost:,.0f} of {lost + counted:,.0f} rollouts were lost to what surrounds the policy{named}",
        "something is down or overloaded; lost rollouts are left out, and those that are left may be the easy ones",
        "mend what the reason names (`mtrl-train check` looks at it), or ask less of it at once (`admission.open`)",
    )


def bound_bites(looked: Looked) -> str | None:
    late = [_dropped(one) for one in list(looked.past)[-BITES:]]
    if len(late) < BITES or not min(late) or fsum(late) < BITTEN * BITES:
        return None
    return _said(
        f"{fsum(late) / BITES:.0%} of the groups of the last {BITES} steps were too stale once over, and dropped",
        "some rollouts take as long as several steps, and the long ones are those that are lost",
        "raise `max_staleness`; or let steps take longer (`prompts`, `n`) or rollouts end sooner (`limits`)",
    )


def _dropped(metrics: Metrics) -> float:
    """A share of the groups that a step came by."""
    dropped = _known(metrics, "staleness/dropped") or 0.0
    return dropped / (dropped + (_known(metrics, "groups/count") or 0.0)) if dropped else 0.0


def _said(seen: str, means: str, remedy: str) -> str:
    return f"{seen}\n  likely: {means}\n  remedy: {remedy}"


Alarm = Callable[[Looked], str | None]
ALARMS: Sequence[Alarm] = (
    nothing_to_compare,
    all_cut_off,
    cut_off_more,
    tools_fail,
    entropy_gone,
    better_on_paper,
    far_apart,
    moved_far,
    many_lost,
    bound_bites,
)


class Alarms:
    """Looks at each step's metrics; a run that goes on has it look at its history first."""

    def __init__(self) -> None:
        self._past: deque[Metrics] = deque(maxlen=REMEMBERED)
        self._start: list[Metrics] = []
        self._quiet: dict[Alarm, int] = {}
        """Of an alarm that has spoken, the looks left until it may speak again."""

    def look(self, metrics: Metrics, reasons: Mapping[str, int] = NOTHING) -> list[str]:
        """What is to be said now. `reasons` are those for which rollouts were lost."""
        self._past.append(metrics)
        if len(self._start) < START and "reward/mean" in metrics:
            self._start.append(metrics)
        looked = Looked(metrics, self._past, self._start, reasons)
        return [said for alarm in ALARMS if (said := self._spoken(alarm, alarm(looked)))]

    def _spoken(self, alarm: Alarm, said: str | None) -> str | None:
        if said is None:
            left = self._quiet.pop(alarm, 0) - 1
            if left > 0:
                self._quiet[alarm] = left
            return None
        spoke_before = alarm in self._quiet
        self._quiet[alarm] = WELL
        return None if spoke_before else said


def _known(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name)
    return value if value is not None and isfinite(value) else None


def _values(past: Sequence[Metrics], name: str) -> list[float]:
    return [value for one in past if (value := _known(one, name)) is not None]


def _mean(past: Sequence[Metrics], name: str) -> float | None:
    values = _values(past, name)
    return fsum(values) / len(values) if values else None


def _risen(past: Sequence[Metrics], name: str) -> tuple[float, float] | None:
    """The means of the first and the last third, if the rise is more than their scatter explains."""
    values = _values(past, name)
    third = len(values) // 3
    if third < 2:
        return None
    first, last = values[:third], values[-third:]
    (low, low_error), (high, high_error) = _spread(first), _spread(last)
    return (low, high) if high - low > SURE * sqrt(low_error + high_error) + 1e-9 else None


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its squared standard error."""
    mean = fsum(values) / len(values)
    return mean, fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)
