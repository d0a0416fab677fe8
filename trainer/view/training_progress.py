"""Live progress of a training run: steps, reward, success, policy metrics, time per phase, and the step's rollouts."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from trainer.engine.base import Generation
from trainer.rollout.rollout import Rollout
from trainer.rollout.steppers import Step
from trainer.view.counters import STATES, RolloutCounters
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
)
from trainer.view.progress import Display, TokenRate, log
from trainer.view.text import to_printable

LOG_INTERVAL_S = 60.0
"""The interval of log lines within a long step, without a terminal."""
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
