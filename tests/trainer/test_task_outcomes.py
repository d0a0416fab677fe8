"""Tests pass@k, pass^k, bootstrap and sign test against their definitions, and the comparison of two evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from random import Random

import pytest

from tests.trainer.cli_data import RunCommand
from tests.trainer.sample_rollouts import LEDGER
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage.rollout_file import RolloutWriter
from trainer.view.task_outcomes import Tries, bootstrap, pass_at_k, pass_hat_k, sign_test


@pytest.mark.parametrize("tried", [1, 3, 5])
def test_pass_at_k_and_pass_hat_k_are_means_over_all_choices_of_k_tries(tried: int) -> None:
    for succeeded, k in product(range(tried + 1), range(1, tried + 1)):
        outcomes = {"a": Tries(succeeded, tried)}
        chosen = [sum(choice) for choice in combinations([True] * succeeded + [False] * (tried - succeeded), k)]
        assert pass_at_k(outcomes, k) == pytest.approx(sum(count > 0 for count in chosen) / len(chosen))
        assert pass_hat_k(outcomes, k) == pytest.approx(sum(count == k for count in chosen) / len(chosen))
    assert pass_at_k({"a": Tries(1, tried)}, tried + 1) is None
    mixed = {"a": Tries(1, 1), "b": Tries(0, 2)}
    assert pass_at_k(mixed, 2) == pass_hat_k(mixed, 2) == 0, "a task with too few tries is not counted"


def test_interval_by_bootstrap_covers_the_mean_and_repeats() -> None:
    draw = Random(0)
    covered = 0
    for _ in range(40):
        chances = [draw.random() for _ in range(40)]
        low, high = bootstrap([float(draw.random() < chance) for chance in chances])
        covered += low <= 0.5 <= high
    assert covered >= 34
    assert bootstrap([0.0, 1.0, 1.0]) == bootstrap([0.0, 1.0, 1.0])


def test_sign_test_counts_the_throws_of_a_coin() -> None:
    for better, worse in product(range(5), range(5)):
        throws = list(product((True, False), repeat=better + worse))
        uneven = [abs(2 * sum(throw) - len(throw)) >= abs(better - worse) for throw in throws]
        assert sign_test(better, worse) == pytest.approx(min(1.0, sum(uneven) / len(throws)))


def write_rollouts(folder: Path, outcomes: dict[str, Sequence[int]]) -> Path:
    """Rollouts of tasks, each with what its tries scored."""
    with RolloutWriter(folder) as writer:
        for number, (task, scores) in enumerate(outcomes.items()):
            for index, score in enumerate(scores):
                rewards = {"answer": float(score)}
                writer.add(Rollout(task, LEDGER, StopReason.DONE, f"e-{number}", index, rewards=rewards))
            writer.add(Rollout(task, LEDGER, StopReason.TOOL_FAILED, f"e-{number}", len(scores)))  # Counts nowhere.
    return folder


def test_runs_are_compared_task_by_task(run: RunCommand) -> None:
    for name in ("sampled", "greedy"):
        write_rollouts(Path("a/eval") / name, {"one": [1, 1], "two": [0, 0], "three": [0, 1], "four": [1], "old": [1]})
        write_rollouts(Path("b/eval") / name, {"one": [1, 1], "two": [0, 1], "three": [1, 1], "four": [0], "new": [1]})
    found = json.loads(run("compare", "a", "b", "--json").stdout)
    assert found.keys() == {"sampled", "greedy"}
    sampled = found["sampled"]
    assert sampled["changed"] == {"four": [[1, 1], [0, 1]], "three": [[1, 2], [2, 2]], "two": [[0, 2], [1, 2]]}
    assert (sampled["tasks"], sampled["better"], sampled["worse"], sampled["p_value"]) == (4, 2, 1, 1.0)
    assert (sampled["first"], sampled["second"], sampled["difference"]) == (0.625, 0.625, 0.0)
    assert sampled["interval"][0] < 0 < sampled["interval"][1] and sampled["only_first"] == sampled["only_second"] == 1
    shown = run("compare", "a/eval/greedy", "b/eval/greedy").output
    assert "0.625 to 0.625 on 4 tasks, +0.000" in shown and "2 better, 1 worse, p = 1 (sign test)" in shown
    assert "four" in shown and "1/1" in shown and "│ one" not in shown


def test_what_cannot_be_compared_is_named_with_its_remedy(run: RunCommand) -> None:
    write_rollouts(Path("a/eval/greedy"), {"one": [1]})
    write_rollouts(Path("b/eval/sampled"), {"one": [1]})
    write_rollouts(Path("c"), {"two": [1]})
    Path("d").mkdir()
    with RolloutWriter(Path("e")) as writer:
        writer.add(Rollout("one", LEDGER, StopReason.DONE, "e-0", 0))
    for first, second, message in (
        ("a", "d", "d: has no evaluation"),
        ("a", "nowhere", "make one with `mtrl-train eval nowhere`"),
        ("a", "b", "has no evaluation of a kind that a has"),
        ("c", "a/eval/greedy", "has no task that c has too"),
        ("e", "c", "no rollout has a score of 'answer'"),
    ):
        assert message in " ".join(run("compare", first, second, code=2).output.split())
