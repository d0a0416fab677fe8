"""The bars are judged as they are promised, and the bench still measures what it says. No time is ever judged here."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bench import bars
from bench.ablations import ARMS, everything, settings, unmasked
from trainer.demo.folder import made
from trainer.demo.warm import Recipe
from trainer.learn.lesson import Draft, lesson
from trainer.train import loop
from trainer.train.compare import WAYS

NOTHING_SHOWN = Recipe(clean=2, habit=0, kinds=("fact",))
SMALL = {"steps": 1, "prompts": 2, "n": 2, "kinds": ["fact"], "evaluation": {"every": 1, "few": 2, "rows": 4}}


def seed(**changes: float) -> bars.Seed:
    good = {"sampled_before": 0.25, "greedy_before": 0.35, "sampled": 0.9, "greedy": 0.9}
    costs = {"warm_core_s": 90.0, "grpo_core_s": 150.0}
    told = good | {way: changes[way] for way in WAYS if way in changes}
    costs |= {name: changes[name] for name in costs if name in changes}
    whole = {**told, "intervals": {way: [0.0, 1.0] for way in WAYS}}
    return bars.Seed(0, **costs, compared=whole, curve={"reward": [0.1, 0.9], "greedy": {}}, read={})


def test_a_seed_that_just_meets_every_bar_meets_it() -> None:
    assert "missed" not in bars.told("default", [seed(), seed(sampled=1.0)], {})


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("sampled_before", 0.26), ("greedy_before", 0.36), ("sampled", 0.89), ("greedy", 0.89),
        ("warm_core_s", 91), ("grpo_core_s", 151),
    ],
)  # fmt: skip
def test_one_seed_that_misses_a_bar_is_the_one_that_counts(figure: str, value: float) -> None:
    text = bars.told("default", [seed(), seed(**{figure: value}), seed()], {})
    assert text.count("**missed**") == 1 and f"| {value:g} | **missed** |" in text


def test_the_second_tasks_bars_are_beyond_their_bounds() -> None:
    text = bars.told("second", [seed(greedy_before=0.5, greedy=0.85)], {})
    assert text.count("**missed**") == 2


def test_a_seed_is_measured_by_what_a_user_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = yaml.safe_load((bars.JOBS / "default.yaml").read_text())
    small = job | SMALL | {"model": str(made(NOTHING_SHOWN, tmp_path / "made"))}
    (tmp_path / "default.yaml").write_text(yaml.safe_dump(small))
    monkeypatch.setattr(bars, "JOBS", tmp_path)
    one = bars.trained("default", 3, None, tmp_path, "fact")
    assert one.seed == 3 and one.warm_core_s > 0 and one.grpo_core_s > 0
    assert one.compared["tasks"] == 4 and one.compared["step"] == 1 and one.compared["held_out"]
    assert len(one.curve["reward"]) == 1 and list(one.curve["greedy"]) == ["0", "1"]


def test_what_tools_wrote_is_trained_as_the_turn_before_it() -> None:
    draft = Draft(
        "one",
        0,
        range(8),
        [False, False, True, True, False, False, True, False],
        [-0.5] * 8,
        [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0],
        [-1, -1, 0, 0, -1, -1, 1, -1],
    )
    changed = everything(draft)
    assert changed.turns == [-1, -1, 0, 0, 0, 0, 1, 1]
    assert changed.mask == [False] * 2 + [True] * 6 and changed.weights == [0.0] * 2 + [1.0] * 6
    assert (changed.ids, changed.engine) == (draft.ids, draft.engine)


def test_the_arms_differ_in_what_they_say_and_in_nothing_else() -> None:
    as_it_is, unmasked_, by_turn = (settings(arm, 0, None) for arm in ARMS)
    assert unmasked_ == as_it_is and by_turn != as_it_is
    assert by_turn.algorithm.credit.kind == "turns"
    assert by_turn.model_copy(update={"algorithm": as_it_is.algorithm}) == as_it_is
    with ARMS[1].patched:
        assert loop.lesson is unmasked
    assert loop.lesson is lesson
