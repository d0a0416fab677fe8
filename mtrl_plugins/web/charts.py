"""The charts of the web UI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.view.learning_summary import REWARD_STATISTICS

CHARTS: Sequence[tuple[str, str, str, Mapping[str, str]]] = (
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


def _chart(title: str, unit: str, scale: str = "linear", **more: Any) -> dict[str, Any]:
    return {"title": title, "unit": unit, "scale": scale, **more}


SERVERS = {
    "distributed/restarts": "ranks",
    "workers/restarts": "workers",
    "engine/restarts": "servers",
    "engine/servers_lost": "servers lost",
}
PUBLISHING = {"time/publish/gather_s": "gathering", "time/publish/transfer_s": "to the engine"}
REJECTED = {"rollout/truncated": "truncated", "mismatch/rejected": "rejected tokens"}
STALENESS = {"rollout/staleness": "mean", "staleness/max": "oldest"}
CACHED = {"engine/tokens/cached_of_possible": "cached of possible"}
WEB_CHARTS = (
    _chart("Cached", "share of input tokens", "share", names=CACHED),
    _chart("Staleness", "versions behind", names=STALENESS),
    _chart("Speed", "tokens a second", names={"engine/tokens/written_per_s": "generated"}),
    _chart("Tool latency", "p95, seconds", within="time/tools/", ending="/p95_s"),
    _chart("Reward functions", "seconds to score a group", within="time/rewards/", ending="/mean_s"),
    _chart("Truncated and rejected", "share of rollouts", "share", names=REJECTED),
    _chart("Idle", "share of a step", "share", names={"idle/trainer": "trainer", "idle/engine": "engine"}),
    _chart("Idle ranks", "behind the busiest", "share", within="distributed/idle/"),
    _chart("Speed of ranks", "tokens a second", within="distributed/tokens_per_s/"),
    _chart("Busiest rank", "times the mean", names={"distributed/imbalance": "tokens to compute"}),
    _chart("Idle workers", "share of a step", "share", within="workers/idle/"),
    _chart("Turns of workers", "seconds", within="workers/turn_s/"),
    _chart("Publishing", "seconds", names=PUBLISHING),
    _chart("Restarts", "in a step", names=SERVERS),
    _chart("Groups", "per step", names={"groups/teaching": "with signal", "groups/count": "all"}),
    _chart("Tasks tried", "tasks", names={f"tasks/{kind}": kind for kind in ("learnable", "solved", "hopeless")}),
    _chart(
        "Processors",
        "cores busy",
        names={"machine/cores": "of this machine", "machine/cores_of_trainer": "of the trainer"},
    ),
    _chart("Memory", "GB", names={"machine/memory_gb": "of the trainer"}, within="machine/gpu_memory_gb/"),
    _chart("GPU use", "share of the time", "share", within="machine/gpu/"),
    _chart("Wasted tokens", "share of a step", "share", names={"tasks/wasted_tokens": "taught nothing"}),
)


def list_charts() -> list[dict[str, Any]]:
    """The charts as JSON: `names` maps metrics to labels; `within` and `ending` are the beginning and the end of the
    names of metrics that depend on the run; `absent` is the value of those that a step lacks while it has others of
    them."""
    names = {"reward/mean": "reward"}
    reward = _chart("Reward", "mean of a step", names=names, within="reward/", without=sorted(REWARD_STATISTICS))
    named = [_chart(title, unit, scale, names=dict(names)) for title, unit, scale, names in CHARTS]
    kinds = (
        _chart("Success by kind, sampled", "share of rollouts", "share", within="success/sampled/"),
        _chart("Success by kind, greedy", "share of held out", "share", within="eval/greedy/"),
        _chart("Mix of kinds", "share of rollouts", "share", within="rollout/kind/", absent=0),
    )
    return [reward, named[0], *kinds, *named[1:], *WEB_CHARTS]
