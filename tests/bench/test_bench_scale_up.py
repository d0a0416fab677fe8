"""Tests of the table of `bench/scale_up.py`: ratios, promises, and parts that failed. Nothing is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import plan_large, scale_up
from bench.scale_up_table import check_promises, format_results

ABOUT = {"date": "2026-11-24", "machine": "2 cores", "versions": "Python 3.11"}


def make_content() -> dict[str, Any]:
    paces = [
        {"workers": count, "turns_per_s": 100.0 * max(1, count), "trainer_ms": 1.0, "worker_ms": 1.0 * (count > 0)}
        for count in (0, 1, 2)
    ]
    found = {
        "ranks": [
            {"ranks": 1, "step_s": 2.0, "floor_s": 2.0, "ratio": 1.0},
            {"ranks": 2, "step_s": 1.25, "floor_s": 1.0, "ratio": 0.8},
        ],
        "workers": {
            "paces": paces,
            "paced": paces[1:],
            "kib": [{"workers": 0, "rollouts": many, "kib": kib} for many, kib in ((1000, 20.0), (10_000, 25.0))],
            "promises": [("0 workers: flat memory", "1.25", False)],
        },
        "plan": [{"job": "a", "ratio": 1.15}, {"job": "b", "ratio": 0.84}],
        "unpaced": [{"job": "a", "ratio": 1.2}],
        "large": {"devices": 1024, "splits": 9, "under_way": 100_000, "cpu_s": 61.0, "kept": False},
        "publish": {
            "parameters": 2e7,
            "adapters": {"megabytes": 2.0, "publish_s": 1.0, "tokens_per_s": 30.0},
            "merged": {"megabytes": 80.0, "publish_s": 4.0, "tokens_per_s": 20.0},
        },
    }
    return {name: {"about": ABOUT, "seconds": 1, "found": part} for name, part in found.items()}


def test_table_has_ratios_and_names_what_is_missed() -> None:
    text = format_results(make_content())
    for row in (
        "| 2 | 0.62 | 0.50 | 0.80 |",
        "| answers at once | 2 | 2.00 | 1.00 | 50% |",
        "| 0 | 10,000 | 1.25 |",
        "| a | 1.15 |",
        "| time of a publish | 0.25 |",
        "| 0 workers: flat memory | 1.25 | **missed** |",
        "| plan of a, set pace: within 15% of the measured step | 1.15 | met |",
        "| plan of b, set pace: within 15% of the measured step | 0.84 | **missed** |",
        "| plan of a, real engine: within 15% of the measured step | 1.20 | **missed** |",
        "| a plan of 1,024 devices, 100,000 rollouts under way: at most a minute | 61 s | **missed** |",
    ):
        assert row in text.splitlines()


def test_failed_part_is_named_and_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(steps: int) -> None:
        raise RuntimeError("no memory\nat all")

    monkeypatch.setattr(scale_up, "measure_plan", fail)
    monkeypatch.setattr(scale_up, "measure_publish", lambda _: make_content()["publish"]["found"])
    monkeypatch.setattr("sys.argv", ["scale_up.py", "--only", "plan", "publish", "--out", str(tmp_path)])
    assert scale_up.main() == 1
    content, text = json.loads((tmp_path / "scale.json").read_text()), (tmp_path / "scale.md").read_text()
    assert "Not measured: RuntimeError: no memory at all" in text and "| bytes | 0.03 |" in text
    failed, *others = content["promises"]
    assert failed == ["the part 'plan' is measured", "RuntimeError: no memory\nat all", False]
    absent = ("ranks", "workers", "unpaced", "large")
    assert others == [[f"the part {name!r} is measured", "not run", False] for name in absent]
    assert check_promises(content) == [tuple(promise) for promise in content["promises"]]


def test_large_plan_is_possible_on_its_devices_and_has_all_rollouts_under_way() -> None:
    measured = plan_large.measure(16, 400)
    assert measured["kept"] and measured["under_way"] >= 400 and measured["part"] == 1
