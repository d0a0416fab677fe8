"""The charts of the web UI: those of the terminal and further ones."""

from __future__ import annotations

from typing import Any

from trainer.view.learning_summary import REWARD_STATISTICS
from trainer.view.plot import CHARTS

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
        "title": "Tool latency",
        "unit": "p95, seconds",
        "scale": "linear",
        "within": "time/tools/",
        "ending": "/p95_s",
        "opens": "tools",
    },
    {
        "title": "Reward functions",
        "unit": "seconds to score a group",
        "scale": "linear",
        "within": "time/rewards/",
        "ending": "/mean_s",
    },
    {
        "title": "Truncated and rejected",
        "unit": "share of rollouts",
        "scale": "share",
        "names": {"rollout/truncated": "truncated", "mismatch/rejected": "rejected tokens"},
    },
    {
        "title": "Idle",
        "unit": "share of a step",
        "scale": "share",
        "names": {"idle/trainer": "trainer", "idle/engine": "engine"},
    },
    {"title": "Idle ranks", "unit": "behind the busiest", "scale": "share", "within": "distributed/idle/"},
    {"title": "Speed of ranks", "unit": "tokens a second", "scale": "linear", "within": "distributed/tokens_per_s/"},
    {
        "title": "Busiest rank",
        "unit": "times the mean",
        "scale": "linear",
        "names": {"distributed/imbalance": "tokens to compute"},
    },
    {"title": "Idle workers", "unit": "share of a step", "scale": "share", "within": "workers/idle/"},
    {"title": "Turns of workers", "unit": "seconds", "scale": "linear", "within": "workers/turn_s/"},
    {
        "title": "Publishing",
        "unit": "seconds",
        "scale": "linear",
        "names": {"time/publish/gather_s": "gathering", "time/publish/transfer_s": "to the engine"},
    },
    {
        "title": "Restarts",
        "unit": "in a step",
        "scale": "linear",
        "names": {
            "distributed/restarts": "ranks",
            "workers/restarts": "workers",
            "engine/restarts": "servers",
            "engine/servers_lost": "servers lost",
        },
    },
    {
        "title": "Groups",
        "unit": "per step",
        "scale": "linear",
        "names": {"groups/teaching": "with signal", "groups/count": "all"},
    },
)


def list_charts() -> list[dict[str, Any]]:
    """The charts as JSON: `names` maps metrics to labels; `within` and `ending` are the beginning and the end of the
    names of metrics that depend on the run; `absent` is the value of those that a step lacks while it has others of
    them; `opens` is the view of a step that a click opens, if not its rollouts."""
    reward = {
        "title": "Reward", "unit": "mean of a step", "scale": "linear", "names": {"reward/mean": "reward"},
        "within": "reward/", "without": sorted(REWARD_STATISTICS),
    }  # fmt: skip
    named = [
        {"title": title, "unit": unit, "scale": scale, "names": dict(names)} for title, unit, scale, names in CHARTS
    ]
    kinds: list[dict[str, Any]] = [
        {
            "title": "Success by kind, sampled",
            "unit": "share of rollouts",
            "scale": "share",
            "within": "success/sampled/",
        },
        {"title": "Success by kind, greedy", "unit": "share of held out", "scale": "share", "within": "eval/greedy/"},
        {
            "title": "Mix of kinds",
            "unit": "share of rollouts",
            "scale": "share",
            "within": "rollout/kind/",
            "absent": 0,
        },
    ]
    return [reward, named[0], *kinds, *named[1:], *WEB_CHARTS]
