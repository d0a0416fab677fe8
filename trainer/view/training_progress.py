"""Live progress of a training run: steps, reward, success, policy metrics, time per phase, and the step's rollouts."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import fsum

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from trainer.engine.base import Generation
from trainer.rollout.rollout import Rollout
from trainer.rollout.steppers import Step
from trainer.storage.run_status import RunStatus
from trainer.view.counters import STATES, CounterSnapshot, RolloutCounters
from trainer.view.learning_summary import LearningSummary
from trainer.view.panel import (
    QUIET,
    format_clock,
    format_status,
    format_times,
    frame,
    join_texts,
    labeled_rows,
    progress_bar,
    rollout_rows,
    with_text,
)
from trainer.view.progress import Display, TokenRate, log, make_status
from trainer.view.text import to_printable

LEAST_SHARE = 0.05
"""The share of the first micro-batch that shows a pace."""


class UpdatePasses:
    """The micro-batches of an update; told by the thread that trains, read by the one that draws."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._passed_at = clock()
        self.passes, self.total, self._tokens = 0.0, 0, 0

    def on_pass(self, passes: float, total: int, tokens: int) -> None:
        """Notes how many micro-batches of all were passed, the last in part, and their tokens. An update begins with
        0."""
        self._passed_at = self._clock()
        if not passes:
            self._began = self._passed_at
        self.passes, self.total, self._tokens = passes, total, tokens

    @property
    def left_s(self) -> float | None:
        """The remaining seconds, once a part of a micro-batch has shown the pace."""
        if self.passes < LEAST_SHARE:
            return None
        left_s = (self._passed_at - self._began) / self.passes * (self.total - self.passes)
        return max(0.0, left_s - (self._clock() - self._passed_at))

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the passed micro-batches per second."""
        return self._tokens / max(self._passed_at - self._began, 1e-9)

    def describe(self) -> str:
        """The update in words, for a line of a log."""
        return f"{int(self.passes)} of {self.total} micro-batches{self._describe_pace()}"

    def row(self) -> RenderableType:
        """A row of the panel."""
        return with_text(progress_bar(self.passes, self.total), Text(f"micro-batches{self._describe_pace()}"))

    def _describe_pace(self) -> str:
        return f", {self.tokens_per_s:,.0f} tokens per s" if self.passes >= LEAST_SHARE else ""


LOG_INTERVAL_S = 60.0
"""The interval of log lines within a long step, without a terminal."""
LEARNING = "learning"
"""The phase of an update."""
WAITING_PHASES = ("rolling out", "waiting", "evaluating")
"""Phases in which no update is under way, since there is nothing to learn from yet."""
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
        self._rate, self._status_rate = TokenRate(), TokenRate()
        self._counts = self._shown = RolloutCounters(clock=now)
        """The counters of the step's rollouts, and the shown ones: an evaluation has its own."""
        self._written, self._writing_s = 0, 0.0
        self._learning = LearningSummary()
        for metrics in history:
            self._add(int(metrics["step"]), metrics)
        self._rows = self._learning.rows()
        self.read_sampled: Callable[[], int] | None = None
        """Reads how many tokens the engine has sampled, if it says so while turns are being written."""
        self._sampled_before = 0
        self._update = UpdatePasses(clock=now)
        self._learning_s = 0.0
        """The seconds of the last step's update."""
        self.describe_workers: Callable[[], str] | None = None
        self.describe_ranks: Callable[[], str] | None = None
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
        self._sampled_before = self._read_sampled()
        self._update = UpdatePasses(clock=self._now)

    def on_pass(self, passes: float, total: int, tokens: int) -> None:
        """Called by an update after each of its micro-batches and of their layers, from its thread."""
        self._update.on_pass(passes, total, tokens)

    def add_rollouts(self, rollouts: int) -> None:
        """Increases the expected number of rollouts of the step."""
        self._counts.add_total(rollouts)

    @contextmanager
    def phase(self, name: str, rollouts: int | None = None) -> Iterator[RolloutCounters]:
        """Accounts time to a phase. With `rollouts`, yields separate counters for rollouts that are not the step's."""
        self._account()
        self._phases.append((name.replace("_", " "), self._now()))
        shown = self._shown
        sampled_before = self._sampled_before
        if rollouts is not None:
            self._shown = RolloutCounters(rollouts, clock=self._now)
            self._sampled_before = self._read_sampled()
        try:
            yield self._shown
        finally:
            self._account()
            name, began = self._phases.pop()
            self._shown = shown
            if rollouts is not None:
                self._sampled_before = sampled_before + self._read_sampled() - self._sampled_before
            if name == LEARNING:
                self._learning_s = self._now() - began

    def take_metrics(self) -> dict[str, float]:
        """Seconds by phase since the last call, and metrics of the step's rollouts."""
        self._account()
        metrics: dict[str, float] = {
            f"time/{name.replace(' ', '_')}_s": spent for name, spent in self._phase_seconds.items()
        }
        metrics |= self._idle_shares()
        self._phase_seconds.clear()
        counted = self._counts.metrics() if self._written else {}
        for name, value in counted.items():
            if name not in MOMENTARY:
                metrics[f"{'time' if name.endswith('_s') else 'engine'}/{name}"] = value
        if self._writing_s:
            metrics["engine/tokens/written_per_s"] = self._written / self._writing_s
        return metrics

    def _idle_shares(self) -> dict[str, float]:
        """The shares of the time in which the trainer waited for rollouts, and the engine had none to generate for."""
        total = fsum(self._phase_seconds.values())
        if not self._written or not total:
            return {}
        waited = fsum(self._phase_seconds.get(name, 0.0) for name in WAITING_PHASES)
        elapsed, evaluating = self._counts.snapshot().elapsed_s, self._phase_seconds.get("evaluating", 0.0)
        shares = {"idle/trainer": waited / total}
        if elapsed > evaluating:
            idle_s = max(0.0, self._counts.engine_idle_s - evaluating)
            shares["idle/engine"] = min(1.0, idle_s / (elapsed - evaluating))
        return shares

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

    @property
    def step_left(self) -> tuple[float, str] | None:
        """The remaining seconds of the phase, or of the step as soon as a step has shown how long its update takes."""
        if self._phase()[0] == LEARNING:
            left_s = self._update.left_s
            return None if left_s is None else (left_s, "of the update")
        left_s = self._counts.snapshot().left_s
        if left_s is None or self._shown is not self._counts or self._phase()[0] not in WAITING_PHASES:
            return None
        return (left_s + self._learning_s, "of the step") if self._learning_s else (left_s, "of the rollouts")

    def _read_sampled(self) -> int:
        return self.read_sampled() if self.read_sampled else 0

    def _snapshot(self) -> CounterSnapshot:
        """The shown counters, with the tokens of turns that are still being written."""
        counters = self._shown.snapshot()
        return replace(counters, written=max(counters.written, self._read_sampled() - self._sampled_before))

    def status(self) -> RunStatus:
        """What the run is doing now, for other processes."""
        counters, (phase, since) = self._snapshot(), self._phase()
        left_s, left_of = self.step_left or (None, "")
        is_learning = phase == LEARNING
        return make_status(
            counters,
            self._status_rate.per_s(counters, over=False),
            step=self.step,
            steps=self.steps,
            phase=phase,
            phase_s=self._now() - since,
            left_s=left_s,
            left_of=left_of,
            run_left_s=self.left_s,
            passes=int(self._update.passes) if is_learning else 0,
            total_passes=self._update.total if is_learning else 0,
        )

    def render(self, *, over: bool) -> RenderableType:
        shown = self._shown
        counters = self._snapshot()
        name = f"rollouts of step {self.step}" if shown is self._counts else f"rollouts, {self._phase()[0]}"
        learning = labeled_rows(
            step=progress_bar(self.done, self.steps),
            phase=join_texts(self._phase_row(over=over)),
            **({"update": self._update.row()} if self._update.total and not over else {}),
            **self._rows,
            **({"ranks": Text(self.describe_ranks())} if self.describe_ranks else {}),
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
        counters, (phase, since) = self._snapshot(), self._phase()
        status = format_status(counters, self._rate.per_s(counters, over=over), over=True)
        workers = f"; workers: {self.describe_workers()}" if self.describe_workers else ""
        left = f", about {format_clock(self.step_left[0])} left {self.step_left[1]}" if self.step_left else ""
        update = f"; {self._update.describe()}" if phase == LEARNING and self._update.total else ""
        spent = format_clock(self._now() - since)
        return f"step {self.step} of {self.steps}; {phase} for {spent}{left}{update}; {status}{workers}"

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
        row = [(name, "bold"), (f"{self._now() - since:.1f} s", "")]
        if left := self.step_left:
            row.append((f"about {format_clock(left[0])} left {left[1]}", ""))
        return row

    def _when(self, *, over: bool) -> str:
        return format_times(self._now() - self._began, None if over else self.left_s)

    def _print(self, text: str) -> None:
        self._last_output = self._now()
        try:
            self.console.print(Text(text), soft_wrap=not self._live)
        except Exception as problem:  # boundary: a closed terminal must not end the run
            log.debug("progress cannot be shown: %s", problem)
