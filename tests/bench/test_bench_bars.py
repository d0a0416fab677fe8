"""Tests of the demo-job benchmark and the ablations; times are not checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import arms, bars
from mtrl_plugins.demo.warm_start import Recipe
from tests.trainer.native_tools import native_tools
from trainer.train.evaluate import VARIANTS


def make_seed(**changes: float) -> bars.Seed:
    success = {"sampled_before": 0.25, "greedy_before": 0.35, "sampled": 0.9, "greedy": 0.9}
    costs = {"warm_core_s": 90.0, "grpo_core_s": 150.0}
    success |= {name: changes[name] for name in VARIANTS if name in changes}
    costs |= {name: changes[name] for name in costs if name in changes}
    compared = {**success, "intervals": {name: [0.0, 1.0] for name in VARIANTS}}
    return bars.Seed(0, **costs, compared=compared, curve={"reward": [0.1, 0.9], "greedy": {}}, read={})


@pytest.mark.parametrize(
    ("figure", "value"), [("sampled_before", 0.26), ("greedy", 0.89), ("warm_core_s", 91), ("grpo_core_s", 151)]
)
def test_a_bar_is_missed_if_one_seed_misses_it(figure: str, value: float) -> None:
    text = bars.format_results("default", [make_seed(), make_seed(**{figure: value}), make_seed()], {})
    assert text.count("**missed**") == 1 and f"| {value:g} | **missed** |" in text


def test_core_seconds_of_a_slow_core_are_compared_as_those_of_the_core_of_the_bars() -> None:
    slow = replace(make_seed(warm_core_s=180.0, grpo_core_s=310.0), slowness=2.0)
    text = bars.format_results("default", [slow], {})
    assert "| 90 | met |" in text and "| 155 | **missed** |" in text and "| 180 | 310 | 2.0x |" in text


def test_a_kind_of_task_has_bars_of_its_own() -> None:
    seed = make_seed()
    kinds = {"renamed_thrice": {"greedy_before": 0.6}}
    text = bars.format_results("second", [replace(seed, compared={**seed.compared, "by_kind": kinds})], {})
    assert "| greedy before, renamed thrice < 0.5 | 0.6 | **missed** |" in text and text.count("| met |") == 1


def test_algorithms_are_compared_on_tasks_within_reach_and_a_stopped_study_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(arms, "TOOLS", native_tools())
    monkeypatch.setattr(arms, "START", Recipe(skill_steps=2, habit_steps=0))
    monkeypatch.setattr(arms, "POOL", 3)
    monkeypatch.setattr(arms, "TRIES", 1)
    monkeypatch.setattr("arms_table.REACH", (0.0, 1.0))

    def compare(*names: str) -> list[tuple[str, float]]:
        words = ["arms.py", "algorithms", "--seeds", "0", "--steps", "1", "--out", str(tmp_path), "--arms", *names]
        monkeypatch.setattr("sys.argv", words)
        arms.main()
        return [(run["arm"], run["rollouts"]) for run in json.loads((tmp_path / "algorithms.json").read_text())["runs"]]

    assert compare("grpo") == [("grpo", 128)]
    capsys.readouterr()
    assert compare("grpo", "gspo") == [("grpo", 128), ("gspo", 128)]
    assert '"arm": "grpo"' not in capsys.readouterr().err, "it was run already"
    table = (tmp_path / "algorithms.md").read_text()
    assert "3 of 3 tasks are kept" in table and "| gspo | 1 | " in table
