"""Metrics of a step by rank: how long each computed, how fast, and how long it waited for the busiest."""

from __future__ import annotations

from trainer.policy.ranks import Ranks


def measure_ranks(ranks: Ranks, tokens: int) -> dict[str, float]:
    """The same metrics on every rank. `tokens` are those that this rank computed in the step."""
    measured = [(float(busy_s), int(count)) for busy_s, count in ranks.gather([ranks.take_busy_s(), tokens])]
    longest = max(busy_s for busy_s, _ in measured)
    metrics = {}
    for rank, (busy_s, count) in enumerate(measured):
        metrics[f"distributed/busy_s/rank_{rank}"] = busy_s
        if longest:
            metrics[f"distributed/idle/rank_{rank}"] = 1 - busy_s / longest
        if busy_s and count:
            metrics[f"distributed/tokens_per_s/rank_{rank}"] = count / busy_s
    return metrics
