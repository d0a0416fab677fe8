"""Alarms about a run that goes wrong: what they read of its metrics, and each with its remedy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, log, sqrt

from gateway.types import EMPTY, Outcome
from trainer.rollout.rollout import StopReason

Metrics = Mapping[str, float]

STANDARD_ERRORS = 3.0
"""Standard errors by which a metric must have risen."""
UNTRAINED = 0.9
"""A model whose tokens are this close to equally likely has random weights; as a share of the largest entropy."""


@dataclass(frozen=True, slots=True)
class AlarmInput:
    """The metrics that alarms are decided by."""

    latest: Metrics
    history: Sequence[Metrics] = ()
    """Oldest first, `latest` included."""
    first_steps: Sequence[Metrics] = ()
    lost_reasons: Mapping[str, int] = field(default_factory=lambda: EMPTY)
    """Why rollouts were lost, with the number for each reason."""
    group_size: int = 0
    """Rollouts of a task; 0 if it is unknown."""
    vocabulary: int = 0
    """The model's number of tokens; 0 if it is unknown."""

    @property
    def is_untrained(self) -> bool:
        """Whether the policy samples its tokens as if all were equally likely."""
        logprob = get_finite(self.latest, "rollout/logprob")
        return self.vocabulary > 1 and logprob is not None and -logprob >= UNTRAINED * log(self.vocabulary)


def format_alarm(seen: str, cause: str, remedy: str) -> str:
    """What was seen, its likely cause, and the remedy."""
    return f"{seen}\n  likely: {cause}\n  remedy: {remedy}"


def get_finite(metrics: Metrics, name: str) -> float | None:
    """The metric, if it is there and finite."""
    value = metrics.get(name)
    return value if value is not None and isfinite(value) else None


def finite_values(history: Sequence[Metrics], name: str) -> list[float]:
    """The metric of each step that has it."""
    return [value for metrics in history if (value := get_finite(metrics, name)) is not None]


def mean(history: Sequence[Metrics], name: str) -> float | None:
    """The mean over the steps that have the metric."""
    values = finite_values(history, name)
    return fsum(values) / len(values) if values else None


def find_rise(history: Sequence[Metrics], name: str) -> tuple[float, float] | None:
    """The means of the first and the last third, if the rise exceeds what their scatter explains."""
    values = finite_values(history, name)
    third = len(values) // 3
    if third < 2:
        return None
    first, last = values[:third], values[-third:]
    (low, low_error), (high, high_error) = _mean_and_error(first), _mean_and_error(last)
    return (low, high) if high - low > STANDARD_ERRORS * sqrt(low_error + high_error) + 1e-9 else None


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its squared standard error."""
    mean = fsum(values) / len(values)
    return mean, fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)


HISTORY_STEPS, QUIET_STEPS = 200, 5
"""Steps that alarms look back on, and those without a sign before an alarm may be printed again."""
FIRST_STEPS = 5
"""Steps whose mean stands for the start of the run."""
EASY, HARD = 0.95, 0.05
"""Success rates beyond which groups are alike because the tasks are too easy or too hard."""
MANY_TRUNCATED = 0.9
"""Share of rollouts that ended at a limit."""
TREND_STEPS, TREND_RISE = 30, 0.1
"""Steps over which shares are compared, and the rise that counts as a trend."""
OUTCOME_PREFIX, TOOL_PREFIX = "engine/outcomes/", "engine/tools/"
FAILED_OUTCOMES = ("error", "timeout", "unavailable", "unknown")
MANY_FAILED, MIN_CALLS = 0.3, 20
"""Share of failed calls of a step, of one tool or of all; with fewer calls there is no alarm."""
MIN_CALLS_EACH, FADED, FADED_STEPS = 0.2, 0.1, 5
"""Calls a rollout at the start from which their loss is told, the share that is left, and the steps that it is of."""
LOW_ENTROPY, LOW_ENTROPY_SHARE = 0.02, 0.1
"""Collapsed entropy: in nats per token, and as a share of the entropy at the start."""
COMPARED_EVALUATIONS = 3
"""Evaluations after the first, before the rises of reward and evaluation are compared."""
MIN_GAIN = 0.03
"""Greedy success that counts as a gain; less may be chance."""
MAX_MISMATCH_KL, MAX_OLD_KL, MAX_REFERENCE_KL = 0.01, 0.1, 10.0
"""Nats per token: engine from trainer, new policy from the one that sampled, policy from its reference."""
MANY_LOST = 0.2
"""Share of rollouts that infrastructure ended."""
LOST_TO_PREFIX = "rollout/lost_to/"
MIN_LOST_TO_TOOL, MANY_LOST_TO_TOOL = 2, 0.05
"""Rollouts that failing calls of one tool cost: at least so many, and at least this share."""
STALE_STEPS, MANY_STALE = 5, 0.1
"""Steps in a row that dropped stale groups, and the share of groups that they dropped."""

LIMIT_SETTINGS = {
    StopReason.LENGTH_TURN: "limits.turn_tokens",
    StopReason.LENGTH_ROLLOUT: "limits.rollout_tokens",
    StopReason.ASSISTANT_TURNS: "limits.assistant_turns",
    StopReason.TOOL_CALLS: "limits.tool_calls",
}
"""Limits that truncate a rollout; reaching the limit on feedback turns is a regular end."""


def check_untrained(given: AlarmInput) -> str | None:
    """Alarms if the policy writes noise."""
    if not given.is_untrained:
        return None
    return format_alarm(
        f"every token is about equally likely: the mean logprob is {given.latest['rollout/logprob']:.3g}, and"
        f" {-log(given.vocabulary):.3g} would be chance among {given.vocabulary:,} tokens",
        "the model has random weights: is this the trained checkpoint?",
        "name the folder of a trained model (`model`); its weights may have been saved under other names than its"
        " configuration expects",
    )


def check_learning_signal(given: AlarmInput) -> str | None:
    """Alarms if all rewards are equal within each group."""
    if given.latest.get("groups/teaching") != 0 or given.is_untrained:
        return None
    if given.group_size == 1:
        return format_alarm(
            "no group has a learning signal: each has a single rollout, so the step changed nothing",
            "the algorithm compares the rollouts of a task with each other, and there is only one of each",
            "set `n` to 8, or choose an algorithm that needs no siblings (`algorithm.name`)",
        )
    success = get_finite(given.latest, "success/sampled")
    cause = "success depends on the task, and hardly on the attempt"
    remedy = "make more attempts per task (`n`), or leave `sampling.temperature` at 1"
    if success is not None and success >= EASY:
        cause = f"{success:.0%} succeed: the tasks have become too easy"
        remedy = "stop here, or add harder tasks (`data`, `curriculum`)"
    elif success is not None and success <= HARD:
        cause = f"{success:.0%} succeed: the tasks are still too hard"
        remedy = (
            "start with easier tasks (`curriculum`) or a better model (`model`), make more attempts per task (`n`), or"
            " give partial credit (`reward`)"
        )
    effect = "only the KL term trained" if given.latest.get("update/tokens") else "the step changed nothing"
    return format_alarm(
        f"no group has a learning signal: the rewards within each group are all equal, so {effect}", cause, remedy
    )


def check_truncation(given: AlarmInput) -> str | None:
    """Alarms if almost all rollouts end at a limit."""
    shares = {stop: get_finite(given.latest, f"stops/{stop}") or 0.0 for stop in LIMIT_SETTINGS}
    if (get_finite(given.latest, "rollout/turns") or 0.0) <= 1:
        shares[StopReason.ASSISTANT_TURNS] = 0.0  # The run is configured for one turn.
    if sum(shares.values()) < MANY_TRUNCATED or given.is_untrained:
        return None
    commonest = max(shares, key=lambda stop: shares[stop])
    if commonest is StopReason.LENGTH_ROLLOUT and given.latest.get("rollout/turns") == 0:
        return format_alarm(
            f"{shares[commonest]:.0%} of the rollouts end by {commonest} before the policy writes anything",
            "the prompts, with the descriptions of the tools, take all the tokens that a rollout may have",
            "raise `limits.rollout_tokens` above the length of the prompts; `--dry-run` tells it",
        )
    return format_alarm(
        f"{sum(shares.values()):.0%} of the rollouts are truncated, {shares[commonest]:.0%} by {commonest}",
        "the limit is too low for the task, or the policy has forgotten how to stop; unfinished rollouts are scored"
        " too, so the reward means little",
        f"raise `{LIMIT_SETTINGS[commonest]}`; if lengths grew from step to step, lower `update.lr`, or add a length"
        " penalty (`algorithm.overlong`)",
    )


def check_truncation_trend(given: AlarmInput) -> str | None:
    """Alarms if more and more rollouts reach a token limit."""
    rise = find_rise(list(given.history)[-TREND_STEPS:], "rollout/truncated")
    if rise is None or rise[1] - rise[0] < TREND_RISE:
        return None
    return format_alarm(
        f"more and more rollouts are truncated by a token limit: {rise[0]:.0%} before, {rise[1]:.0%} recently",
        "the policy writes longer from step to step, or forgets how to stop; unfinished rollouts are scored too",
        "read some rollouts (`mtrl-train view`); raise `limits.rollout_tokens` if length helps, or add a length penalty"
        " (`algorithm.overlong`)",
    )


def check_tool_failures(given: AlarmInput) -> str | None:
    """Alarms about the tool that fails most; about all tools together if none was called often enough."""
    by_tool = [(f" of `{name}`", outcomes) for name, outcomes in _tool_outcomes(given.latest)]
    all_tools = [("", _read_outcomes(given.latest, OUTCOME_PREFIX))]
    failing = [item for item in by_tool if _is_failing(item[1])] or all_tools
    of_tool, outcomes = max(failing, key=lambda item: _count_failed(item[1]) / max(1.0, fsum(item[1].values())))
    if not _is_failing(outcomes):
        return None
    calls, worst = fsum(outcomes.values()), max(FAILED_OUTCOMES, key=lambda outcome: outcomes.get(outcome, 0.0))
    return format_alarm(
        f"{_count_failed(outcomes) / calls:.0%} of the calls{of_tool} fail; {outcomes[worst]:,.0f} of {calls:,.0f}"
        f" calls end as `{worst}`",
        "a tool raises errors, or its server is down or too slow for so many calls at once; the policy learns to do"
        " without it",
        "look at failed calls (`mtrl-train view`, by outcome), and fix the tool, or give it more time (`timeout_s`)",
    )


def _tool_outcomes(metrics: Metrics) -> Iterator[tuple[str, dict[str, float]]]:
    """How the calls of each tool ended."""
    names = {name.removeprefix(TOOL_PREFIX).rpartition("/")[0] for name in metrics if name.startswith(TOOL_PREFIX)}
    return ((name, _read_outcomes(metrics, f"{TOOL_PREFIX}{name}/")) for name in sorted(names))


def _read_outcomes(metrics: Metrics, prefix: str) -> dict[str, float]:
    return {outcome: value for outcome in Outcome if (value := get_finite(metrics, prefix + outcome)) is not None}


def _count_failed(outcomes: Mapping[str, float]) -> float:
    return fsum(outcomes.get(outcome, 0.0) for outcome in FAILED_OUTCOMES)


def _is_failing(outcomes: Mapping[str, float]) -> bool:
    calls = fsum(outcomes.values())
    return calls >= MIN_CALLS and _count_failed(outcomes) >= MANY_FAILED * calls


def check_tool_use(given: AlarmInput) -> str | None:
    """Alarms if the policy stops calling tools although many tasks are not solved."""
    first, now = mean(given.first_steps, "rollout/calls"), mean(list(given.history)[-FADED_STEPS:], "rollout/calls")
    success = get_finite(given.latest, "success/sampled") or 0.0
    if first is None or now is None or first < MIN_CALLS_EACH or now > FADED * first or success >= EASY:
        return None
    return format_alarm(
        f"the policy hardly calls tools any more: {now:.2g} calls a rollout, {first:.2g} at the start; {success:.0%}"
        " succeed",
        "a guess earns as much as a call, or calls cost more than they earn: they fail, or length is penalised",
        "look at failed calls and at rewarded rollouts without one (`mtrl-train view`); reward only what needs the"
        " tool, or go back to an earlier checkpoint with a lower `update.lr`",
    )


def check_entropy(given: AlarmInput) -> str | None:
    """Alarms if the entropy has collapsed."""
    entropy, first = get_finite(given.latest, "entropy"), mean(given.first_steps, "entropy")
    success = get_finite(given.latest, "success/sampled") or 0.0
    if entropy is None or first is None or success >= EASY:
        return None
    if entropy >= LOW_ENTROPY or entropy >= LOW_ENTROPY_SHARE * first:
        return None
    return format_alarm(
        f"the entropy has collapsed: {entropy:.2g} nats per token, {first:.2g} at the start; {success:.0%} succeed",
        "the policy writes the same again and again and tries nothing new, so there is little left to learn from",
        "start again, or from an earlier checkpoint, with a lower `update.lr`, a higher `algorithm.clip_high`, or a KL"
        " term (`algorithm.kl.coefficient`)",
    )


def check_reward_against_evaluation(given: AlarmInput) -> str | None:
    """Alarms if the reward rose over the last evaluations, and greedy success did not (possible reward hacking)."""
    evaluated = [i for i, metrics in enumerate(given.history) if get_finite(metrics, "eval/greedy") is not None]
    if len(evaluated) <= COMPARED_EVALUATIONS:
        return None
    since = list(given.history)[evaluated[-1 - COMPARED_EVALUATIONS] : evaluated[-1] + 1]
    before, now = since[0]["eval/greedy"], since[-1]["eval/greedy"]
    rise = find_rise(since[1:], "reward/mean")
    if rise is None or now - before >= MIN_GAIN or now >= EASY:
        return None
    seen = (
        f"the reward rose from {rise[0]:.3g} to {rise[1]:.3g} over the last {COMPARED_EVALUATIONS} evaluations, but"
        f" greedy success on the evaluation tasks did not: {before:.0%} then, {now:.0%} now"
    )
    if find_rise(since[1:], "success/sampled"):
        return format_alarm(
            seen,
            "sampled success rose too, so the policy becomes surer of what it could do already, as with a lower"
            " temperature, or it memorises the training tasks",
            "use more varied tasks (`data`), raise `algorithm.clip_high`, and do not rely on the reward alone",
        )
    return format_alarm(
        seen,
        "sampled success did not rise either, so the policy earns reward without solving the task (reward hacking)",
        "read rollouts (`mtrl-train show`) to see what is rewarded, and fix that component of `reward`, or lower its"
        " weight",
    )


def check_engine_mismatch(given: AlarmInput) -> str | None:
    """Alarms if engine and trainer disagree about logprobs."""
    mismatch = get_finite(given.latest, "mismatch/kl")
    if mismatch is None or mismatch < MAX_MISMATCH_KL:
        return None
    return format_alarm(
        f"the logprobs of engine and trainer differ: mismatch/kl is {mismatch:.2g} nats per token",
        "the engine samples from another policy than the one that is trained: other weights, other precision, or a"
        " sampling filter",
        "check that each step's weights reach the engine, and leave `sampling` at its defaults; until then the loss is"
        " corrected, unless `algorithm.mismatch.truncate: never` is set without `algorithm.mismatch.reject`",
    )


def check_policy_drift(given: AlarmInput) -> str | None:
    """Alarms if the policy moved too far from the one that sampled, or from its reference."""
    old, reference = get_finite(given.latest, "kl/old") or 0.0, get_finite(given.latest, "kl/reference") or 0.0
    if old >= MAX_OLD_KL and get_finite(given.latest, "staleness/max"):
        return format_alarm(
            f"the policy is far from the versions that sampled its rollouts: kl/old is {old:.2g} nats per token",
            "the versions differ so much that most ratios are clipped, and little is learned from the rollouts",
            "lower `max_staleness` or `update.lr`",
        )
    if old >= MAX_OLD_KL:
        return format_alarm(
            f"a single step moves the policy far: kl/old is {old:.2g} nats per token",
            "the step is too large: the rollouts no longer represent the new policy",
            "lower `update.lr` or `update.max_grad_norm`",
        )
    if reference >= MAX_REFERENCE_KL:
        return format_alarm(
            f"the policy is far from its reference: kl/reference is {reference:.2g} nats per token",
            "it gets rewards for text that no natural model would write",
            "read rollouts (`mtrl-train show`); raise `algorithm.kl.coefficient`, or lower `update.lr`",
        )
    return None


def check_lost_rollouts(given: AlarmInput) -> str | None:
    """Alarms if many rollouts are lost to infrastructure or to reward functions."""
    lost, counted = (get_finite(given.latest, f"rollout/{name}") or 0.0 for name in ("lost", "count"))
    if not lost or lost < MANY_LOST * (lost + counted):
        return None
    reason, count = max(given.lost_reasons.items(), key=lambda item: item[1], default=("", 0))
    reasons = f", {count:,} of them because of: {reason.rstrip('.')}" if reason else ""
    if reason.startswith("component "):
        return format_alarm(
            f"{lost:,.0f} of {lost + counted:,.0f} rollouts have no reward{reasons}",
            "a reward function fails on them; they are dropped, and the remaining ones may be the easy ones",
            "fix that reward function, so that it returns a number for every rollout",
        )
    return format_alarm(
        f"{lost:,.0f} of {lost + counted:,.0f} rollouts were lost to infrastructure{reasons}",
        "something is down or overloaded; lost rollouts are dropped, and the remaining ones may be the easy ones",
        "fix what the reason names (`--dry-run` tests it); run fewer rollouts at once if it is overloaded"
        " (`concurrency.inflight_rollouts`)",
    )


def check_lost_to_tools(given: AlarmInput) -> str | None:
    """Alarms if failing calls of a tool cost rollouts: those that do without it are left."""
    lost = {
        name.removeprefix(LOST_TO_PREFIX): count
        for name, count in given.latest.items()
        if name.startswith(LOST_TO_PREFIX) and isfinite(count)
    }
    counted = (get_finite(given.latest, "rollout/count") or 0.0) + (get_finite(given.latest, "rollout/lost") or 0.0)
    tool, count = max(lost.items(), key=lambda item: item[1], default=("", 0.0))
    if count < max(MIN_LOST_TO_TOOL, MANY_LOST_TO_TOOL * counted):
        return None
    return format_alarm(
        f"{count:,.0f} of {counted:,.0f} rollouts were lost because calls of `{tool}` failed or took too long",
        "more of the rollouts that are left did without it, so the policy may learn to avoid it",
        "give the tool more time or fewer calls at once (timeout_s and at_once of its entry), or let it answer with"
        " an error that the policy can read",
    )


def check_stale_groups(given: AlarmInput) -> str | None:
    """Alarms if many finished groups are dropped as too stale."""
    shares = [_dropped_share(metrics) for metrics in list(given.history)[-STALE_STEPS:]]
    if len(shares) < STALE_STEPS or not min(shares) or fsum(shares) < MANY_STALE * STALE_STEPS:
        return None
    return format_alarm(
        f"{fsum(shares) / STALE_STEPS:.0%} of the groups of the last {STALE_STEPS} steps were dropped as too stale when"
        " they were finished",
        "some rollouts take as long as several steps, so the long ones are lost",
        "raise `max_staleness`; or make steps longer (`prompts`, `n`) or rollouts shorter (`limits`)",
    )


def _dropped_share(metrics: Metrics) -> float:
    """The share of a step's finished groups that were dropped as too stale."""
    dropped = get_finite(metrics, "staleness/dropped") or 0.0
    return dropped / (dropped + (get_finite(metrics, "groups/count") or 0.0)) if dropped else 0.0


Alarm = Callable[[AlarmInput], str | None]
ALARMS: Sequence[Alarm] = (
    check_untrained, check_learning_signal, check_truncation, check_truncation_trend, check_tool_failures,
    check_tool_use, check_entropy, check_reward_against_evaluation, check_engine_mismatch, check_policy_drift,
    check_lost_rollouts, check_lost_to_tools, check_stale_groups,
)  # fmt: skip


class Alarms:
    """Checks each step's metrics. A resumed run checks its history first."""

    def __init__(self, group_size: int = 0, vocabulary: int = 0) -> None:
        self._group_size, self._vocabulary = group_size, vocabulary
        self._history: deque[Metrics] = deque(maxlen=HISTORY_STEPS)
        self._first_steps: list[Metrics] = []
        self._quiet_left: dict[Alarm, int] = {}
        """For alarms that were printed: steps without a sign that are left until they may be printed again."""

    def check(self, metrics: Metrics, lost_reasons: Mapping[str, int] = EMPTY) -> list[str]:
        """Returns the texts of new alarms."""
        self._history.append(metrics)
        if len(self._first_steps) < FIRST_STEPS and "reward/mean" in metrics:
            self._first_steps.append(metrics)
        given = AlarmInput(metrics, self._history, self._first_steps, lost_reasons, self._group_size, self._vocabulary)
        return [text for alarm in ALARMS if (text := self._suppress_repeated(alarm, alarm(given)))]

    def _suppress_repeated(self, alarm: Alarm, text: str | None) -> str | None:
        if text is None:
            left = self._quiet_left.pop(alarm, 0) - 1
            if left > 0:
                self._quiet_left[alarm] = left
            return None
        was_printed = alarm in self._quiet_left
        self._quiet_left[alarm] = QUIET_STEPS
        return None if was_printed else text
