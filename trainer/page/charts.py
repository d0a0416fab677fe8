"""What a page draws of a run: the charts of paper and terminal, and those for which only a page has room."""

from __future__ import annotations

from typing import Any

from trainer.view.curves import NAMED
from trainer.view.learning import UNWORTHY

MORE = (
    {
        "title": "Cached",
        "unit": "share of asked tokens",
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
        "names": {"engine/tokens/written_per_s": "written"},
    },
    {
        "title": "Cut off and lost",
        "unit": "share of rollouts",
        "scale": "share",
        "names": {"rollout/truncated": "truncated", "mismatch/rejected": "rejected tokens"},
    },
    {
        "title": "Groups",
        "unit": "of a step",
        "scale": "linear",
        "names": {"groups/teaching": "teaching", "groups/count": "all"},
    },
)


def charts() -> list[dict[str, Any]]:
    """`names` are metrics and what they are called; behind `within` stand those whose names only a run knows."""
    reward = {
        "title": "Reward", "unit": "mean of a step", "scale": "linear", "names": {"reward/mean": "reward"},
        "within": "reward/", "without": sorted(UNWORTHY),
    }  # fmt: skip
    named = [
        {"title": title, "unit": unit, "scale": scale, "names": dict(names)} for title, unit, scale, names in NAMED
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
    return [reward, named[0], *kinds, *named[1:], *MORE]
