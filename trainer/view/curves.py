"""A few charts tell how a training went; which numbers share one is decided here, for paper and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite, nan
from typing import Literal

from trainer.view.chart import Curve
from trainer.view.learning import components, phases

History = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    scale: Literal["linear", "share", "log"] = "linear"
    """`share` is from 0 to 1."""


NAMED: Sequence[tuple[str, str, Literal["linear", "share", "log"], Mapping[str, str]]] = (
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
            "mismatch/kl": "mismatch",
            "mismatch/max": "largest mismatch",
            "agreement/max": "servers and trainer",
        },
    ),
    ("Length", "tokens a rollout", "linear", {"rollout/tokens": "tokens"}),
    ("Turns and calls", "a rollout", "linear", {"rollout/turns": "turns", "rollout/calls": "calls"}),
    ("Gradient", "norm before clipping", "linear", {"update/grad_norm": "gradient norm"}),
)


def charts(history: History) -> list[Chart]:
    """Those of which something was measured."""
    return [chart for chart in (_reward(history), *_named(history)) if chart.curves]


def spent(history: History) -> dict[str, list[tuple[float, float]]]:
    """Of each phase, its seconds by step; the phase that takes the most comes first."""
    steps = [one for one in history if one["step"] > 0]
    names = {name for one in steps for name in phases(one)}
    by_phase = {name: [(one["step"], phases(one).get(name, 0.0)) for one in steps] for name in names}
    return dict(sorted(by_phase.items(), key=lambda item: (-sum(seconds for _, seconds in item[1]), item[0])))


def smooth(curve: Curve) -> Curve:
    """Each point as the mean of those around it, a tenth of all, so that no point lags behind; ends lean on fewer."""
    reach = len(curve.points) // 20
    values = [value for _, value in curve.points]
    means = []
    for place, (step, _) in enumerate(curve.points):
        around = values[max(0, place - reach) : place + reach + 1]
        means.append((step, fsum(around) / len(around)))
    return Curve(curve.name, tuple(means), curve.sparse)


def _reward(history: History) -> Chart:
    parts = dict.fromkeys(name for one in history for name in components(one))
    named = {"reward/mean": "reward"} | ({f"reward/{part}": part for part in parts} if len(parts) > 1 else {})
    return Chart("Reward", "mean of a step", tuple(_curves(history, named)))


def _named(history: History) -> Iterator[Chart]:
    for title, unit, scale, names in NAMED:
        yield Chart(title, unit, tuple(_curves(history, names, positive=scale == "log")), scale)


def _curves(history: History, names: Mapping[str, str], *, positive: bool = False) -> Iterator[Curve]:
    for name, said in names.items():
        points = tuple(
            (one["step"], value)
            for one in history
            if isfinite(value := one.get(name, nan)) and (value > 0 or not positive)
        )
        if points:
            yield Curve(said, points, sparse=name.startswith("eval/"))
