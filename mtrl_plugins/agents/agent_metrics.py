"""Metrics of agents: what they changed, branches of their chats, and requests that were refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from trainer.rollout.rollout import Rollout


def compute_agent_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Metrics of the rollouts that agents played; none if there are none."""
    infos = [rollout.infos["agent"] for rollout in rollouts if isinstance(rollout.infos.get("agent"), dict)]
    if not infos:
        return {}
    changed: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    for info in infos:
        changed.update(info.get("changed_by_agent", {}))
        requests.update(info.get("requests", {}))
    metrics = {
        "agent/branches": sum(info.get("branches", 1) for info in infos) / len(infos),
        "agent/retokenised": float(sum(info.get("retokenised", 0) for info in infos)),
    }
    metrics |= {f"agent/changed/{cause}": float(count) for cause, count in sorted(changed.items())}
    return metrics | {f"agent/requests/{problem}": float(count) for problem, count in sorted(requests.items())}
