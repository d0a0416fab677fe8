"""Whether a run learns is told by a handful of numbers and where they are going; this is the fold of its steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

from rich.text import Text

from trainer.view.chart import Trend, number
from trainer.view.panel import BAD, Piece, duration, joined
from trainer.view.text import line

WIDE, NARROW = 20, 12
"""Columns of a trend."""
UNWORTHY = frozenset({"reward/mean", "reward/std", "reward/failed"})
"""Of the area `reward`, what is no component."""


def components(metrics: Mapping[str, float]) -> dict[str, float]:
    """What the reward is made of, by name."""
    return {
        name.removeprefix("reward/"): value
        for name, value in metrics.items()
        if name.startswith("reward/") and name not in UNWORTHY
    }


def phases(metrics: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, as a person names it."""
    return {
        name.removeprefix("time/").removesuffix("_s").replace("_", " "): value
        for name, value in metrics.items()
        if name.startswith("time/") and name.endswith("_s") and name.count("/") == 1
    }


class Learning:
    """Keeps the last of each number, trends, and sums: no more memory for a long run than for a short one."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.trends = {"reward/mean": Trend(WIDE), "success/sampled": Trend(NARROW)}
        self.evaluated: int | None = None
        """The step after which success was last asked of held-out tasks."""
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
            for name, seconds in phases(metrics).items():
                self.spent[name] += seconds

    def rows(self) -> dict[str, Text]:
        known, trends = self.latest, self.trends
        return {
            "reward": joined(_reward(known, f" {trends['reward/mean']}")),
            "success": joined([*_sampled(known, f" {trends['success/sampled']}"), *self._greedy()]),
            "policy": joined(_policy(known)),
            "time": joined(self._time()),
        }

    def words(self, metrics: Mapping[str, float]) -> str:
        """One step as text: its own metrics, but for the last evaluation."""
        reward = [text for text, _ in _reward(metrics)]
        told = [f"reward {reward[0]}" + (f" ({', '.join(reward[1:])})" if reward[1:] else "")] if reward else []
        told += [_listed([*_sampled(metrics), *self._greedy()]), _listed(_policy(metrics))]
        most = sorted(phases(metrics).items(), key=lambda item: -item[1])
        told.append(", ".join(f"{name} {duration(seconds)}" for name, seconds in most))
        return "; ".join(text for text in told if text)

    def _greedy(self) -> list[Piece]:
        if self.evaluated is None:
            return []
        when = f"after step {self.evaluated}" if self.evaluated else "before the first step"
        return [(f"greedy {self.latest.get('eval/greedy', 0.0):.0%} {when}", "bold")]

    def _time(self) -> list[Piece]:
        whole = sum(self.spent.values())
        if not whole or not self.steps:
            return []
        most = sorted(self.spent.items(), key=lambda item: -item[1])
        shares = [(f"{name} {seconds / whole:.0%}", "") for name, seconds in most]
        return [(f"{duration(whole / self.steps)} a step", "bold"), *shares]


def _reward(known: Mapping[str, float], trend: str = "") -> list[Piece]:
    if "reward/mean" not in known:
        return []
    parts = components(known)
    shown = parts if len(parts) > 1 else {}
    return [
        (f"{known['reward/mean']:.3f}{trend}", "bold"),
        *((f"{line(name)} {number(value)}", "") for name, value in shown.items()),
    ]


def _sampled(known: Mapping[str, float], trend: str = "") -> list[Piece]:
    return [(f"sampled {known['success/sampled']:.0%}{trend}", "")] if "success/sampled" in known else []


def _policy(known: Mapping[str, float]) -> list[Piece]:
    distance = "kl/reference" if "kl/reference" in known else "kl/old"
    named = {"entropy": "entropy", distance: "KL", "mismatch/mean": "mismatch", "update/grad_norm": "grad norm"}
    told = [(f"{said} {number(known[name])}", "") for name, said in named.items() if name in known]
    return [*told, *_stale(known)]


def _stale(known: Mapping[str, float]) -> Iterator[Piece]:
    """Where rollouts run ahead of learning."""
    if "staleness/max" in known:
        mean, most = known.get("rollout/staleness", 0.0), known["staleness/max"]
        yield f"staleness {number(mean)}, at most {most:.0f}", ""
    if dropped := known.get("staleness/dropped"):
        yield f"{dropped:.0f} groups dropped", BAD


def _listed(pieces: Iterable[Piece]) -> str:
    return ", ".join(text for text, _ in pieces)
