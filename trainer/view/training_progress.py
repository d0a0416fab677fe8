"""Live progress of a training run: steps, reward, success, policy metrics, time per phase, and the step's rollouts."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum, isfinite

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from trainer.engine.base import Generation
from trainer.rollout.rollout import Rollout
from trainer.rollout.steppers import Step
from trainer.view.counters import STATES, RolloutCounters
from trainer.view.panel import (
    BAD,
    QUIET,
    StyledText,
    format_clock,
    format_duration,
    format_status,
    format_times,
    frame,
    join_texts,
    labeled_rows,
    progress_bar,
    rollout_rows,
)
from trainer.view.progress import Display, TokenRate, log
from trainer.view.terminal_chart import Trend, format_number
from trainer.view.text import to_line, to_printable

WIDE, NARROW = 20, 12
"""Widths of the sparklines of reward and success."""
REWARD_STATISTICS = frozenset({"reward/mean", "reward/std", "reward/failed"})
"""Metrics of the area `reward` that are not components."""


def reward_components(metrics: Mapping[str, float]) -> dict[str, float]:
    """The reward's components by name."""
    return {
        name.removeprefix("reward/"): value
        for name, value in metrics.items()
        if name.startswith("reward/") and name not in REWARD_STATISTICS
    }


def phase_times(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, with names for display."""
    return {
        name.removeprefix("time/").removesuffix("_s").replace("_", " "): value
        for name, value in metrics.items()
        if name.startswith("time/") and name.endswith("_s") and name.count("/") == 1
    }


class LearningSummary:
    """The latest value of each metric, sparklines, and time per phase, in constant memory."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.trends = {"reward/mean": Trend(WIDE), "success/sampled": Trend(NARROW)}
        self.evaluated: int | None = None
        """The step after which the policy was last evaluated."""
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.steps = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.latest |= {name: value for name, value in metrics.items() if isfinite(value)}
        for name, trend in self.trends.items():
            if name in metrics:
                trend.add(metrics[name])
        if "eval/greedy" in metrics:
            self.evaluated = step
        if step > 0:
            self.steps += 1
            for name, seconds in phase_times(metrics).items():
                self.spent[name] += seconds

    def rows(self) -> dict[str, Text]:
        latest, trends = self.latest, self.trends
        return {
            "reward": join_texts(_format_reward(latest, f" {trends['reward/mean']}")),
            "success": join_texts([*_format_success(latest, f" {trends['success/sampled']}"), *self._format_greedy()]),
            "policy": join_texts(_format_policy(latest)),
            "time": join_texts(self._format_time()),
        }

    def format_step(self, metrics: Mapping[str, float]) -> str:
        """A step's metrics as one line, with the last evaluation."""
        reward = [text for text, _ in _format_reward(metrics)]
        texts = [f"reward {reward[0]}" + (f" ({', '.join(reward[1:])})" if reward[1:] else "")] if reward else []
        texts += [
            _join_plain([*_format_success(metrics), *self._format_greedy()]),
            _join_plain(_format_policy(metrics)),
        ]
        by_duration = sorted(phase_times(metrics).items(), key=lambda item: -item[1])
        texts.append(", ".join(f"{name} {format_duration(seconds)}" for name, seconds in by_duration))
        return "; ".join(text for text in texts if text)

    def _format_greedy(self) -> list[StyledText]:
        if self.evaluated is None:
            return []
        when = f"after step {self.evaluated}" if self.evaluated else "before the first step"
        return [(f"greedy {self.latest.get('eval/greedy', 0.0):.0%} {when}", "bold")]

    def _format_time(self) -> list[StyledText]:
        total = sum(self.spent.values())
        if not total or not self.steps:
            return []
        by_duration = sorted(self.spent.items(), key=lambda item: -item[1])
        shares = [(f"{name} {seconds / total:.0%}", "") for name, seconds in by_duration]
        return [(f"{format_duration(total / self.steps)} a step", "bold"), *shares]


def _format_reward(metrics: Mapping[str, float], trend: str = "") -> list[StyledText]:
    if "reward/mean" not in metrics:
        return []
    components = reward_components(metrics)
    shown = components if len(components) > 1 else {}
    return [
        (f"{metrics['reward/mean']:.3f}{trend}", "bold"),
        *((f"{to_line(name)} {format_number(value)}", "") for name, value in shown.items()),
    ]


def _format_success(metrics: Mapping[str, float], trend: str = "") -> list[StyledText]:
    return [(f"sampled {metrics['success/sampled']:.0%}{trend}", "")] if "success/sampled" in metrics else []


def _format_policy(metrics: Mapping[str, float]) -> list[StyledText]:
    kl = "kl/reference" if "kl/reference" in metrics else "kl/old"
    labels = {"entropy": "entropy", kl: "KL", "mismatch/mean": "mismatch", "update/grad_norm": "grad norm"}
    texts = [(f"{label} {format_number(metrics[name])}", "") for name, label in labels.items() if name in metrics]
    return [*texts, *_format_staleness(metrics)]


def _format_staleness(metrics: Mapping[str, float]) -> Iterator[StyledText]:
    """The staleness, if rollouts run ahead of training."""
    if "staleness/max" in metrics:
        mean, maximum = metrics.get("rollout/staleness", 0.0), metrics["staleness/max"]
        yield f"staleness {format_number(mean)}, at most {maximum:.0f}", ""
    if dropped := metrics.get("staleness/dropped"):
        yield f"{dropped:.0f} groups dropped", BAD


def _join_plain(pieces: Iterable[StyledText]) -> str:
    return ", ".join(text for text, _ in pieces)


LOG_INTERVAL_S = 60.0
"""The interval of log lines within a long step, without a terminal."""
RECENT_STEPS = 20
"""Steps from which the remaining time is estimated."""
MOMENTARY = frozenset(
    {*(f"rollouts/{state}" for state in STATES), "tokens/written_per_s", "time/left_s", "time/elapsed_s"}
)
"""Metrics of one moment, which are not reported for a whole step."""


class TrainingProgress(Display):
    """Shows the progress of a training run; a `Watch` for its rollouts."""

    def __init__(
        self,
        steps: int,
        *,
        console: Console,
        history: Sequence[Mapping[str, float]] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`history` has the metrics of the steps before the run was resumed."""
        super().__init__(console, LOG_INTERVAL_S)
        self.steps, self.step, self.done = steps, 0, 0
        self._now = now
        self._began = self._accounted_until = self._last_output = now()
        self._phases: list[tuple[str, float]] = []
        """Running phases, the innermost last, with their start."""
        self._phase_seconds: defaultdict[str, float] = defaultdict(float)
        self._step_times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_step_end = self._began
        """The end of the last step."""
        self._rate = TokenRate()
        self._counts = self._shown = RolloutCounters(clock=now)
        """The counters of the step's rollouts, and the shown ones: an evaluation has its own."""
        self._written, self._writing_s = 0, 0.0
        self._learning = LearningSummary()
        for metrics in history:
            self._add(int(metrics["step"]), metrics)
        self._rows = self._learning.rows()
        self.describe_workers: Callable[[], str] | None = None
        """Says how many rollout workers are up, if there are any."""

    def on_state(self, key: str, state: str) -> None:
        self._counts.on_state(key, state)

    def on_generation(self, key: str, written: Generation, asked: int) -> None:
        self._counts.on_generation(key, written, asked)

    def on_step(self, key: str, step: Step, seconds: float) -> None:
        self._counts.on_step(key, step, seconds)

    def on_end(self, key: str, rollout: Rollout) -> None:
        self._counts.on_end(key, rollout)

    def begin(self, step: int, total_rollouts: int) -> None:
        """Starts a step; `total_rollouts` is 0 if the number is unknown."""
        self.step = step
        self._counts = self._shown = self._counts.restart(total_rollouts)
        self._written, self._writing_s = 0, 0.0

    def add_rollouts(self, rollouts: int) -> None:
        """Increases the expected number of rollouts of the step."""
        self._counts.total += rollouts

    @contextmanager
    def phase(self, name: str, rollouts: int | None = None) -> Iterator[RolloutCounters]:
        """Accounts time to a phase. With `rollouts`, yields separate counters for rollouts that are not the step's."""
        self._account()
        self._phases.append((name.replace("_", " "), self._now()))
        shown = self._shown
        if rollouts is not None:
            self._shown = RolloutCounters(rollouts, clock=self._now)
        try:
            yield self._shown
        finally:
            self._account()
            self._phases.pop()
            self._shown = shown

    def take_metrics(self) -> dict[str, float]:
        """Seconds by phase since the last call, and metrics of the step's rollouts."""
        self._account()
        metrics: dict[str, float] = {
            f"time/{name.replace(' ', '_')}_s": spent for name, spent in self._phase_seconds.items()
        }
        self._phase_seconds.clear()
        counted = self._counts.metrics() if self._written else {}
        for name, value in counted.items():
            if name not in MOMENTARY:
                metrics[f"{'time' if name.endswith('_s') else 'engine'}/{name}"] = value
        if self._writing_s:
            metrics["engine/tokens/written_per_s"] = self._written / self._writing_s
        return metrics

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ends a step with its metrics. Step 0 stands for what is measured before the first step."""
        self._add(step, metrics)
        self._rows = self._learning.rows()
        now = self._now()
        if step > 0:
            self._step_times.append(now - self._last_step_end)
        self._last_step_end = now
        if not self._live:
            self._print(f"step {step} of {self.steps}; {self._learning.format_step(metrics)}; {self._when(over=False)}")

    def print_message(self, text: str) -> None:
        """Prints an alarm or a note above the panel."""
        self._print(to_printable(text))

    @property
    def left_s(self) -> float | None:
        """The remaining time at the pace of recent steps."""
        if not self._step_times or self.done >= self.steps:
            return None
        each = fsum(self._step_times) / len(self._step_times)
        return max(0.0, each * (self.steps - self.done) - (self._now() - self._last_step_end))

    def render(self, *, over: bool) -> RenderableType:
        shown = self._shown
        counters = shown.snapshot()
        name = f"rollouts of step {self.step}" if shown is self._counts else f"rollouts, {self._phase()[0]}"
        learning = labeled_rows(
            step=progress_bar(self.done, self.steps),
            phase=join_texts(self._phase_row(over=over)),
            **self._rows,
            **({"workers": Text(self.describe_workers())} if self.describe_workers else {}),
        )
        rule = Rule(Text(name, style="default"), style=QUIET, align="left")
        return frame(
            Group(learning, rule, rollout_rows(counters, self._rate.per_s(counters, over=over))),
            self._when(over=over),
            self.console.width,
        )

    def format_line(self, *, over: bool) -> str:
        """A log line within a long step; `end_step` prints the step's metrics."""
        if over or self._now() - self._last_output < LOG_INTERVAL_S or not self._phases:
            return ""
        self._last_output = self._now()
        counters, (phase, since) = self._shown.snapshot(), self._phase()
        status = format_status(counters, self._rate.per_s(counters, over=over), over=True)
        workers = f"; workers: {self.describe_workers()}" if self.describe_workers else ""
        return f"step {self.step} of {self.steps}; {phase} for {format_clock(self._now() - since)}; {status}{workers}"

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done = step
        self._learning.add(step, metrics)

    def _account(self) -> None:
        """Accounts the time since the last call to the innermost phase."""
        now, written = self._now(), self._counts.written
        if self._phases:
            self._phase_seconds[self._phases[-1][0]] += now - self._accounted_until
            if written > self._written:
                self._writing_s += now - self._accounted_until
        self._accounted_until, self._written = now, written

    def _phase(self) -> tuple[str, float]:
        return next(iter(self._phases[-1:]), ("", self._now()))  # Another thread may end the phase.

    def _phase_row(self, *, over: bool) -> list[tuple[str, str]]:
        name, since = self._phase()
        if over or not name:
            return [(f"over after step {self.done}" if over else "between two", QUIET)]
        return [(name, "bold"), (f"{self._now() - since:.1f} s", "")]

    def _when(self, *, over: bool) -> str:
        return format_times(self._now() - self._began, None if over else self.left_s)

    def _print(self, text: str) -> None:
        self._last_output = self._now()
        try:
            self.console.print(Text(text), soft_wrap=not self._live)
        except Exception as problem:  # boundary: a closed terminal must not end the run
            log.debug("progress cannot be shown: %s", problem)
