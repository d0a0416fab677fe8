"""Tests of the memory benchmark: a step that did not train what was planned is no measurement."""

from __future__ import annotations

from itertools import product

import pytest

from bench.memory import REWARD, ROLLOUTS, SHAPES, STEPS, TOKENS, TOLERANCE, MeasureError, check_updates
from bench.readme import PAGE, results

STEP = {"update/grad_norm": 1.0, "update/lr": 1e-4, "update/rows": 16.0, "rollout/tokens": 500.0}


def test_steps_that_trained_all_rollouts_are_measured() -> None:
    assert (ROLLOUTS["1M"], TOKENS["1M"]) == (16, 512)
    check_updates("1M", [STEP] * STEPS)


@pytest.mark.parametrize(
    "change", [{"update/grad_norm": 0.0}, {"update/lr": 0.0}, {"update/rows": 8.0}, {"rollout/tokens": 300.0}], ids=str
)
def test_a_step_that_trained_less_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(MeasureError, match="1M: step 2 did not train all of its rollouts"):
        check_updates("1M", [STEP, STEP | change])


def test_a_run_with_fewer_steps_is_refused() -> None:
    with pytest.raises(MeasureError, match="1M: 1 steps of 2 were made"):
        check_updates("1M", [STEP])


def test_rewards_differ_between_siblings() -> None:
    names: dict[str, object] = {}
    exec(REWARD, names)
    rewards = [names["rank"](None) for _ in range(4)]  # type: ignore[operator]
    assert len({*rewards}) == 4


def test_measured_cells_are_planned_within_the_promise_and_the_page_names_the_others() -> None:
    rows = {(row["size"], row["checkpointing"], row["lora"]): row for row in results("memory.json")["rows"]}
    cells = {*product(SHAPES, (False, True), (False, True))}
    assert rows and rows.keys() <= cells
    assert [cell for cell, row in rows.items() if abs(row["planned"] / row["measured"] - 1) > TOLERANCE] == []
    missing = [size for size in SHAPES if any(cell[0] == size for cell in cells - rows.keys())]
    note = f"Not measured yet: {', '.join(missing)}." if missing else ""
    assert note in PAGE.read_text(encoding="utf-8")
