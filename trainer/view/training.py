"""A training is watched while it goes on: how far it is, whether it learns, where its time goes, and its rollouts."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import fsum

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from trainer.engine.base import Written
from trainer.run.rollout import Rollout
from trainer.steps import Step
from trainer.view.counts import STATES, Counts
from trainer.view.learning import Learning
from trainer.view.panel import QUIET, bar, clock, framed, joined, plain, rollouts, rows, when
from trainer.view.progress import Display, Pace, log
from trainer.view.text import printable

SILENT_S = 60.0
"""Where there is no terminal, a step that takes long says so this often."""
LATE = 20
"""The time left is told by so many steps."""
PASSING = frozenset(
    {*(f"rollouts/{state}" for state in STATES), "tokens/written_per_s", "time/left_s", "time/elapsed_s"}
)
"""What is counted of a moment, and says nothing once the step is over."""


class TrainingProgress(Display):
    """A block in which a training is shown, and a `Watch` for its rollouts."""

    def __init__(
        self,
        steps: int,
        *,
        console: Console,
        history: Sequence[Mapping[str, float]] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`history` is what earlier starts of the same run measured."""
        super().__init__(console, SILENT_S)
        self.steps, self.step, self.done = steps, 0, 0
        self._now = now
        self._began = self._marked = self._spoke = now()
        self._phases: list[tuple[str, float]] = []
        """Under way, the innermost last, and when each began."""
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._late: deque[float] = deque(maxlen=LATE)
        self._since = self._began
        """When the last step was over."""
        self._pace = Pace()
        self._counts = self._shown = Counts(clock=now)
        """The step's rollouts, and those that are shown: an evaluation has its own."""
        self._written, self._writing_s = 0, 0.0
        self._learning = Learning()
        for one in history:
            self._add(int(one["step"]), one)
        self._rows = self._learning.rows()

    def state(self, key: str, state: str) -> None:
        self._counts.state(key, state)

    def wrote(self, key: str, written: Written, asked: int) -> None:
        self._counts.wrote(key, written, asked)

    def answered(self, key: str, step: Step, seconds: float) -> None:
        self._counts.answered(key, step, seconds)

    def ended(self, key: str, rollout: Rollout) -> None:
        self._counts.ended(key, rollout)

    def begin(self, step: int, total_rollouts: int) -> None:
        """Everything that is counted from here on is this step's; 0 rollouts are so many as there are."""
        self.step = step
        self._counts = self._shown = self._counts.anew(total_rollouts)
        self._written, self._writing_s = 0, 0.0

    def more(self, rollouts: int) -> None:
        """The step has so many more than it began with."""
        self._counts.total += rollouts

    @contextmanager
    def phase(self, name: str, rollouts: int | None = None) -> Iterator[Counts]:
        """What takes time now. With `rollouts` there are so many that are not the step's own, and count apart: by what
        this gives."""
        self._account()
        self._phases.append((name.replace("_", " "), self._now()))
        shown = self._shown
        if rollouts is not None:
            self._shown = Counts(rollouts, clock=self._now)
        try:
            yield self._shown
        finally:
            self._account()
            self._phases.pop()
            self._shown = shown

    def measured(self) -> dict[str, float]:
        """Of the machine: seconds by phase since this was last asked, and what was counted of the step's rollouts."""
        self._account()
        told: dict[str, float] = {f"time/{name.replace(' ', '_')}_s": spent for name, spent in self._spent.items()}
        self._spent.clear()
        counted = self._counts.snapshot() if self._written else {}
        for name, value in counted.items():
            if name not in PASSING:
                told[f"{'time' if name.endswith('_s') else 'engine'}/{name}"] = value
        if self._writing_s:
            told["engine/tokens/written_per_s"] = self._written / self._writing_s
        return told

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step is over, and this is what came of it. Step 0 is what is measured before the first."""
        self._add(step, metrics)
        self._rows = self._learning.rows()
        now = self._now()
        if step > 0:
            self._late.append(now - self._since)
        self._since = now
        if not self._live:
            self._print(f"step {step} of {self.steps}; {self._learning.words(metrics)}; {self._when(over=False)}")

    def said(self, text: str) -> None:
        """An alarm, or a note: it stays above the panel."""
        self._print(printable(text))

    @property
    def left_s(self) -> float | None:
        """At the pace of late."""
        if not self._late or self.done >= self.steps:
            return None
        each = fsum(self._late) / len(self._late)
        return max(0.0, each * (self.steps - self.done) - (self._now() - self._since))

    def picture(self, *, over: bool) -> RenderableType:
        shown = self._shown
        seen = shown.seen()
        name = f"rollouts of step {self.step}" if shown is self._counts else f"rollouts, {self._phase()[0]}"
        learning = rows(step=bar(self.done, self.steps), phase=joined(self._phase_row(over=over)), **self._rows)
        rule = Rule(Text(name, style="default"), style=QUIET, align="left")
        return framed(
            Group(learning, rule, rollouts(seen, self._pace.per_s(seen, over=over))),
            self._when(over=over),
            self.console.width,
        )

    def line(self, *, over: bool) -> str:
        """While a step takes long; what came of it is a line of its own."""
        if over or self._now() - self._spoke < SILENT_S or not self._phases:
            return ""
        self._spoke = self._now()
        seen, (phase, since) = self._shown.seen(), self._phase()
        told = plain(seen, self._pace.per_s(seen, over=over), over=True)
        return f"step {self.step} of {self.steps}; {phase} for {clock(self._now() - since)}; {told}"

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done = step
        self._learning.add(step, metrics)

    def _account(self) -> None:
        """The time since this was last done is the innermost phase's."""
        now, written = self._now(), self._counts.written
        if self._phases:
            self._spent[self._phases[-1][0]] += now - self._marked
            if written > self._written:
                self._writing_s += now - self._marked
        self._marked, self._written = now, written

    def _phase(self) -> tuple[str, float]:
        return next(iter(self._phases[-1:]), ("", self._now()))  # It may end meanwhile: another thread draws.

    def _phase_row(self, *, over: bool) -> list[tuple[str, str]]:
        name, since = self._phase()
        if over or not name:
            return [(f"over after step {self.done}" if over else "between two", QUIET)]
        return [(name, "bold"), (f"{self._now() - since:.1f} s", "")]

    def _when(self, *, over: bool) -> str:
        return when(self._now() - self._began, None if over else self.left_s)

    def _print(self, text: str) -> None:
        self._spoke = self._now()
        try:
            self.console.print(Text(text), soft_wrap=not self._live)
        except Exception as problem:  # boundary: as for the panel, a terminal that has gone takes nothing with it
            log.debug("progress cannot be shown: %s", problem)
