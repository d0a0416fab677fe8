"""The charts of a training run: which metrics share a chart, for the terminal and for files; the success criterion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, nan
from pathlib import Path
from typing import Literal, Self

from trainer.storage.run_files import read_run_info
from trainer.view.learning_summary import phase_times, reward_components
from trainer.view.terminal_chart import Curve


@dataclass(frozen=True, slots=True)
class SuccessCriterion:
    """When a rollout counts as a success: a reward component and its threshold, from the run's settings."""

    component: str = ""
    threshold: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> Self:
        reward = read_run_info(folder).get("settings", {}).get("reward")
        components = (reward or {}).get("components")
        if not components:
            return cls()
        return cls(reward.get("success") or next(iter(components)), reward.get("success_at", 1.0))

    def is_success(self, rewards: Mapping[str, float]) -> bool | None:
        return rewards[self.component] >= self.threshold if self.component in rewards else None


History = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves that share axes."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    scale: Literal["linear", "share", "log"] = "linear"
    """`share` is from 0 to 1."""


CHARTS: Sequence[tuple[str, str, Literal["linear", "share", "log"], Mapping[str, str]]] = (
    (
        "Success",
        "share of rollouts",
        "share",
        {
            "success/sampled": "sampled",
            "eval/sampled": "held out, sampled",
            "eval/greedy": "held out, greedy",
        },
    ),
    ("Entropy", "nats a token", "linear", {"entropy": "entropy"}),
    (
        "KL and mismatch",
        "nats a token",
        "log",
        {
            "kl/reference": "KL to reference",
            "kl/old": "KL of a step",
            "mismatch/kl": "mismatch KL",
            "mismatch/max": "largest mismatch",
            "agreement/max": "servers and trainer",
        },
    ),
    ("Length", "tokens a rollout", "linear", {"rollout/tokens": "tokens"}),
    ("Turns and calls", "a rollout", "linear", {"rollout/turns": "turns", "rollout/calls": "calls"}),
    ("Gradient", "norm before clipping", "linear", {"update/grad_norm": "gradient norm"}),
)


def build_charts(history: History) -> list[Chart]:
    """The charts that have at least one curve."""
    return [chart for chart in (_reward_chart(history), *_metric_charts(history)) if chart.curves]


def phase_seconds(history: History) -> dict[str, list[tuple[float, float]]]:
    """The seconds by step of each phase, the longest phase first."""
    steps = [metrics for metrics in history if metrics["step"] > 0]
    names = {name for metrics in steps for name in phase_times(metrics)}
    by_phase = {name: [(metrics["step"], phase_times(metrics).get(name, 0.0)) for metrics in steps] for name in names}
    return dict(sorted(by_phase.items(), key=lambda item: (-sum(seconds for _, seconds in item[1]), item[0])))


def smooth(curve: Curve) -> Curve:
    """The curve with each point replaced by a centred mean over a tenth of all points, fewer at the ends."""
    reach = len(curve.points) // 20
    values = [value for _, value in curve.points]
    means = []
    for index, (step, _) in enumerate(curve.points):
        around = values[max(0, index - reach) : index + reach + 1]
        means.append((step, fsum(around) / len(around)))
    return Curve(curve.name, tuple(means), curve.sparse)


def _reward_chart(history: History) -> Chart:
    parts = dict.fromkeys(name for metrics in history for name in reward_components(metrics))
    named = {"reward/mean": "reward"} | ({f"reward/{part}": part for part in parts} if len(parts) > 1 else {})
    return Chart("Reward", "mean of a step", tuple(_build_curves(history, named)))


def _metric_charts(history: History) -> Iterator[Chart]:
    for title, unit, scale, names in CHARTS:
        yield Chart(title, unit, tuple(_build_curves(history, names, positive=scale == "log")), scale)


def _build_curves(history: History, names: Mapping[str, str], *, positive: bool = False) -> Iterator[Curve]:
    for name, label in names.items():
        points = tuple(
            (metrics["step"], value)
            for metrics in history
            if isfinite(value := metrics.get(name, nan)) and (value > 0 or not positive)
        )
        if points:
            yield Curve(label, points, sparse=name.startswith("eval/"))
