"""Early stopping: ends a run once its model succeeds often enough, in training or in an evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import fmean

from trainer.train.checkpoint import measured_value
from trainer.train.settings import EarlyStopSettings

WINDOW = 5
"""The steps whose rollouts `early_stop.training` is measured by."""


class EarlyStop:
    """Decides after each step whether the run ends before its last one."""

    def __init__(self, settings: EarlyStopSettings | None, history: Iterable[Mapping[str, float]] = ()) -> None:
        """`history` has the metrics of the steps before the run was resumed."""
        self.settings = settings
        self._trained: deque[float] = deque(maxlen=WINDOW)
        self._evaluated: float | None = None
        for metrics in history:
            self.add(metrics)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Takes a step's metrics, or those of its evaluation."""
        if "success/sampled" in metrics:
            self._trained.append(metrics["success/sampled"])
        if (value := measured_value(metrics)) is not None:
            self._evaluated = value

    @property
    def reason(self) -> str | None:
        """Why the run ends now; None if it goes on."""
        if self.settings is None:
            return None
        training, evaluation, reasons = self.settings.training, self.settings.evaluation, []
        if training is not None:
            if len(self._trained) < WINDOW or fmean(self._trained) < training:
                return None
            reasons.append(f"{fmean(self._trained):.1%} of the last {WINDOW} steps' rollouts succeeded")
        if evaluation is not None:
            if self._evaluated is None or self._evaluated < evaluation:
                return None
            reasons.append(f"{self._evaluated:.1%} of the held-out tasks succeeded")
        return f"{' and '.join(reasons)}: enough for `early_stop`"
