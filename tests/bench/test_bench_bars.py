"""Tests of the demo-job benchmark and the ablations; times are not checked."""

from __future__ import annotations

import pytest

from bench import bars
from bench.ablations import unmask_tool_tokens
from trainer.algorithms.train_batch import TrainSequence
from trainer.train.evaluate import VARIANTS


def make_seed(**changes: float) -> bars.Seed:
    success = {"sampled_before": 0.25, "greedy_before": 0.35, "sampled": 0.9, "greedy": 0.9}
    costs = {"warm_core_s": 90.0, "grpo_core_s": 150.0}
    success |= {name: changes[name] for name in VARIANTS if name in changes}
    costs |= {name: changes[name] for name in costs if name in changes}
    compared = {**success, "intervals": {name: [0.0, 1.0] for name in VARIANTS}}
    return bars.Seed(0, **costs, compared=compared, curve={"reward": [0.1, 0.9], "greedy": {}}, read={})


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
