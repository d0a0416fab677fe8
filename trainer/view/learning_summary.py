"""What the panel and the log say of a run's steps: reward, success, the policy, time per phase, and who was idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from operator import itemgetter

from rich.text import Text

from trainer.view.panel import BAD, StyledText, join_texts
from trainer.view.text import format_duration, to_line

BLOCKS = "▁▂▃▄▅▆▇█"
WIDE, NARROW = 20, 12
"""Widths of the sparklines of reward and success."""
REWARD_STATISTICS = frozenset({"reward/mean", "reward/std", "reward/failed"})
"""Metrics of the area `reward` that are not components."""
LINE_LABELS = {"entropy": "entropy", "kl": "KL", "mismatch/mean": "mismatch", "update/grad_norm": "grad norm"}
"""Of metrics in a step's line; `kl` is the one to the reference, or else of a step."""


class Trend:
    """A sparkline over any number of steps, stored as at most `2 * width` means of equally many steps."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._means: list[float] = []
        self._steps_per_mean = 1
        """Steps in a mean."""
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        if not isfinite(value):
            return
        self._pending.append(value)
        if len(self._pending) == self._steps_per_mean:
            self._means.append(sum(self._pending) / self._steps_per_mean)
            self._pending = []
        if len(self._means) == 2 * self._width:
            self._means = [
                (first + second) / 2 for first, second in zip(self._means[::2], self._means[1::2], strict=True)
            ]
            self._steps_per_mean *= 2

    def __str__(self) -> str:
        """The means as blocks, scaled from the lowest to the highest."""
        means = [*self._means, *([sum(self._pending) / len(self._pending)] if self._pending else [])]
        while len(means) > self._width:
            means = [sum(means[index : index + 2]) / len(means[index : index + 2]) for index in range(0, len(means), 2)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        height = (high - low) or 1.0
        return "".join(BLOCKS[min(7, int((mean - low) / height * 8))] for mean in means)


def format_number(value: float) -> str:
    """The value with three digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


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
            "idle": join_texts(_format_idle(latest)),
        }

    def format_step(self, metrics: Mapping[str, float]) -> str:
        """A step's metrics as one line, with the last evaluation."""
        reward = [text for text, _ in _format_reward(metrics)]
        texts = [f"reward {reward[0]}" + (f" ({', '.join(reward[1:])})" if reward[1:] else "")] if reward else []
        if not reward and "loss" in metrics:
            texts = [f"loss {metrics['loss']:.3f}"]
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
    labels = {kl if name == "kl" else name: label for name, label in LINE_LABELS.items()}
    texts = [(f"{label} {format_number(metrics[name])}", "") for name, label in labels.items() if name in metrics]
    return [*texts, *_format_staleness(metrics)]


def _format_staleness(metrics: Mapping[str, float]) -> Iterator[StyledText]:
    """The staleness, if rollouts run ahead of training."""
    if "staleness/max" in metrics:
        mean, maximum = metrics.get("rollout/staleness", 0.0), metrics["staleness/max"]
        yield f"staleness {format_number(mean)}, at most {maximum:.0f}", ""
    if dropped := metrics.get("staleness/dropped"):
        yield f"{dropped:.0f} groups dropped", BAD


def _format_idle(metrics: Mapping[str, float]) -> Iterator[StyledText]:
    """Who waits for whom: the shares of the latest step in which each role had nothing to do."""
    for role in ("trainer", "engine"):
        if f"idle/{role}" in metrics:
            yield f"{role} {metrics[f'idle/{role}']:.0%}", ""
    for prefix, label in (("distributed/idle/", ""), ("workers/idle/", "worker ")):
        idle = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        if idle:
            (least, low), (most, high) = min(idle.items(), key=itemgetter(1)), max(idle.items(), key=itemgetter(1))
            names = [f"{label}{to_line(name).replace('_', ' ')}" for name in (least, most)]
            yield f"{names[0]} {low:.0%} to {names[1]} {high:.0%}", ""
    if "distributed/imbalance" in metrics:
        yield f"busiest rank {metrics['distributed/imbalance']:.2f} of the mean", ""


def _join_plain(pieces: Iterable[StyledText]) -> str:
    return ", ".join(text for text, _ in pieces)
