"""Descriptions of metrics."""

from __future__ import annotations

from trainer.view.metrics import DESCRIPTIONS, describe_metric


def test_unknown_metric_has_no_description() -> None:
    assert describe_metric("reward") is None
    assert describe_metric("nothing/like/this") is None


def test_exact_name_wins_over_a_pattern() -> None:
    assert describe_metric("reward/failed") == DESCRIPTIONS["reward/failed"]
    assert describe_metric("reward/failed") != describe_metric("reward/outcome")
