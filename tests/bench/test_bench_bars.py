"""Tests of the demo-job benchmark and the ablations; times are not checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bench import bars
from bench.ablations import ARMS, arm_settings, build_unmasked_batch, unmask_tool_tokens
from mtrl_plugins.demo.model_cache import find_or_build_model
from mtrl_plugins.demo.warm_start import Recipe
from trainer.algorithms.train_batch import TrainSequence, build_train_batch
from trainer.cli import app
from trainer.train import train_loop
from trainer.train.evaluate import VARIANTS

UNTRAINED = Recipe(skill_steps=2, habit_steps=0, kinds=("fact",))
SMALL_JOB = {
    "steps": 1,
    "prompts": 2,
    "n": 2,
    "demo": {"kinds": ["fact"]},
    "evaluation": {"every": 1, "few": 2, "rows": 4},
}


def make_seed(**changes: float) -> bars.Seed:
    success = {"sampled_before": 0.25, "greedy_before": 0.35, "sampled": 0.9, "greedy": 0.9}
    costs = {"warm_core_s": 90.0, "grpo_core_s": 150.0}
    success |= {name: changes[name] for name in VARIANTS if name in changes}
    costs |= {name: changes[name] for name in costs if name in changes}
    compared = {**success, "intervals": {name: [0.0, 1.0] for name in VARIANTS}}
    return bars.Seed(0, **costs, compared=compared, curve={"reward": [0.1, 0.9], "greedy": {}}, read={})


def test_values_equal_to_the_bounds_meet_the_bars() -> None:
    assert "missed" not in bars.format_results("default", [make_seed(), make_seed(sampled=1.0)], {})


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("sampled_before", 0.26), ("greedy_before", 0.36), ("sampled", 0.89), ("greedy", 0.89),
        ("warm_core_s", 91), ("grpo_core_s", 151),
    ],
)  # fmt: skip
def test_a_bar_is_missed_if_one_seed_misses_it(figure: str, value: float) -> None:
    text = bars.format_results("default", [make_seed(), make_seed(**{figure: value}), make_seed()], {})
    assert text.count("**missed**") == 1 and f"| {value:g} | **missed** |" in text


def test_the_second_tasks_bounds_are_exclusive() -> None:
    text = bars.format_results("second", [make_seed(greedy_before=0.5, greedy=0.85)], {})
    assert text.count("**missed**") == 2


def test_seeds_are_added_to_those_that_the_results_have(tmp_path: Path) -> None:
    for seed in (replace(make_seed(), seed=1), replace(make_seed(), seed=0), make_seed(sampled=0.5)):
        seeds = bars.add_seeds(tmp_path / "bars", [seed])
        bars._write_results(tmp_path / "bars", "default", seeds, {})
    assert [(seed.seed, seed.figure("sampled")) for seed in seeds] == [(0, 0.5), (1, 0.9)]
    assert bars.add_seeds(tmp_path / "bars", []) == seeds


def run_here(args: Sequence[str], cache: Path) -> tuple[str, float]:
    """`mtrl-train` in this process; what a process of its own costs is measured by another test."""
    done = CliRunner().invoke(app, [*args])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.stdout, 1.0


def test_a_command_is_measured_with_its_processor_time_and_a_failure_is_told(tmp_path: Path) -> None:
    output, seconds = bars._run_command(["--help"], tmp_path)
    assert "mtrl-train" in output and 0 < seconds < 60
    with pytest.raises(
        RuntimeError, match=r"mtrl-train --config nosuch ended with 2:\n(?s:.*)remedy: name a YAML file"
    ):
        bars._run_command(["--config", "nosuch"], tmp_path)


@pytest.mark.parametrize("name", ["default", "agent"])
def test_a_seed_is_measured_with_the_commands_of_a_user(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bars.ROOT)
    monkeypatch.setattr(bars, "_run_command", run_here)
    job = yaml.safe_load((bars.JOBS / f"{name}.yaml").read_text())
    small = job | SMALL_JOB | {"model": str(find_or_build_model(UNTRAINED, tmp_path / "made"))}
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.setattr(bars, "JOBS", tmp_path)
    result = bars.train_seed(name, 3, None, tmp_path, "fact")
    assert result.seed == 3 and result.warm_core_s > 0 and result.grpo_core_s > 0
    assert result.compared["tasks"] == 4 and result.compared["step"] == 1 and result.compared["held_out"]
    assert len(result.curve["reward"]) == 1 and list(result.curve["greedy"]) == ["0", "1"]


def test_unmasked_tool_tokens_are_trained_as_part_of_the_turn_before_them() -> None:
    sequence = TrainSequence(
        "one",
        0,
        range(8),
        [False, False, True, True, False, False, True, False],
        [-0.5] * 8,
        [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0],
        [-1, -1, 0, 0, -1, -1, 1, -1],
    )
    changed = unmask_tool_tokens(sequence)
    assert changed.turns == [-1, -1, 0, 0, 0, 0, 1, 1]
    assert changed.mask == [False] * 2 + [True] * 6 and changed.weights == [0.0] * 2 + [1.0] * 6
    assert (changed.ids, changed.engine_logprobs) == (sequence.ids, sequence.engine_logprobs)


def test_the_arms_differ_only_in_what_they_state() -> None:
    baseline, unmasked, by_turn = (arm_settings(arm, 0, None) for arm in ARMS)
    assert unmasked == baseline and by_turn != baseline
    assert by_turn.algorithm.credit.kind == "turns"
    assert by_turn.model_copy(update={"algorithm": baseline.algorithm}) == baseline
    with ARMS[1].patch_training():
        assert train_loop.build_train_batch is build_unmasked_batch
    assert train_loop.build_train_batch is build_train_batch
