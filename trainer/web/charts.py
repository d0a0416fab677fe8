"""The charts of the web UI: those of the terminal and further ones."""

from __future__ import annotations

from typing import Any

from trainer.view.curves import CHARTS
from trainer.view.training_progress import REWARD_STATISTICS

WEB_CHARTS = (
    {
        "title": "Cached",
        "unit": "share of input tokens",
        "scale": "share",
        "names": {"engine/tokens/cached_of_possible": "cached of possible"},
    },
    {
        "title": "Staleness",
        "unit": "versions behind",
        "scale": "linear",
        "names": {"rollout/staleness": "mean", "staleness/max": "oldest"},
    },
    {
        "title": "Speed",
        "unit": "tokens a second",
        "scale": "linear",
        "names": {"engine/tokens/written_per_s": "generated"},
    },
    {
        "title": "Truncated and rejected",
        "unit": "share of rollouts",
        "scale": "share",
        "names": {"rollout/truncated": "truncated", "mismatch/rejected": "rejected tokens"},
    },
    {
        "title": "Groups",
        "unit": "per step",
        "scale": "linear",
        "names": {"groups/teaching": "with signal", "groups/count": "all"},
    },
)


def list_charts() -> list[dict[str, Any]]:
    """The charts as JSON: `names` maps metrics to labels; `within` is the prefix of metrics that depend on the run."""
    reward = {
        "title": "Reward", "unit": "mean of a step", "scale": "linear", "names": {"reward/mean": "reward"},
        "within": "reward/", "without": sorted(REWARD_STATISTICS),
    }  # fmt: skip
    named = [
        {"title": title, "unit": unit, "scale": scale, "names": dict(names)} for title, unit, scale, names in CHARTS
    ]
    kinds = [
        {
            "title": "Success by kind, sampled",
            "unit": "share of rollouts",
            "scale": "share",
            "within": "success/sampled/",
        },
        {"title": "Success by kind, greedy", "unit": "share of held out", "scale": "share", "within": "eval/greedy/"},
    ]
    return [reward, named[0], *kinds, *named[1:], *WEB_CHARTS]
