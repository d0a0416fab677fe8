"""Descriptions of metrics: every metric of a run has one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.view.metrics import DESCRIPTIONS, describe_metric

RUNS = sorted((Path(__file__).parents[1] / "fixtures" / "old_run" / "runs").rglob("metrics.jsonl"))


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.parent.name)
def test_every_metric_of_a_run_has_a_description(file: Path) -> None:
    names = {name for line in file.read_text(encoding="utf-8").splitlines() for name in json.loads(line)}
    assert names
    assert {name for name in names if describe_metric(name) is None} == set()


def test_unknown_metric_has_no_description() -> None:
    assert describe_metric("reward") is None
    assert describe_metric("nothing/like/this") is None


def test_exact_name_wins_over_a_pattern() -> None:
    assert describe_metric("reward/failed") == DESCRIPTIONS["reward/failed"]
    assert describe_metric("reward/failed") != describe_metric("reward/outcome")
