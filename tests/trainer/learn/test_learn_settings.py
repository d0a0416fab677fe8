"""Settings and algorithms name the same things; which rounds are trained is said for each token."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from pydantic import ValidationError

from tests.trainer.rollouts import ledgers
from trainer import learn
from trainer.learn.algorithms import NAMES, Clip
from trainer.learn.loss import bounds
from trainer.learn.rounds import RoundsError, every, last, weights
from trainer.learn.settings import AlgorithmSettings, MismatchSettings, Name, OverlongSettings
from trainer.ledger import Author, Entry, Ledger

HERE = Path(learn.__file__).parent
SAID = Ledger(
    (
        Entry(Author.TASK, (1, 2)),
        Entry(Author.POLICY, (3,), logprobs=(-0.1,)),
        Entry(Author.TOOL, (4, 5)),
        Entry(Author.POLICY, (6, 7), logprobs=(-0.1, -0.2)),
    )
)


def test_every_algorithm_has_a_name_in_the_settings_and_a_file_of_under_60_lines() -> None:
    assert set(get_args(Name)) == set(NAMES)
    for name, algorithm in NAMES.items():
        file = HERE / "algorithms" / f"{name}.py"
        assert algorithm.name == name and len(file.read_text().splitlines()) < 60


def test_learning_is_arithmetic_and_knows_no_model() -> None:
    allowed = {"torch", "trainer", "gateway", "pydantic", *sys.stdlib_module_names}
    data = ("trainer.learn", "trainer.ledger", "trainer.run.rollout", "trainer.reward.scored", "trainer.plug")
    for file in HERE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in names} <= allowed
            assert all(name.startswith(data) for name in names if "trainer" in name)


def test_settings_are_read_without_torch() -> None:
    code = "import sys, trainer.learn.settings, trainer.learn.rounds; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_what_is_not_set_is_as_the_algorithm_has_it() -> None:
    assert bounds(AlgorithmSettings(name="dapo")) == Clip(0.2, 0.28)
    assert bounds(AlgorithmSettings(name="dapo", clip_low=0.0)) == Clip(0.0, 0.28)
    assert AlgorithmSettings(overlong=OverlongSettings(limit=10, margin=10)).length == 1024
    assert bounds(AlgorithmSettings(name="cispo", clip_high=2.0)) == Clip(1.0, 2.0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: AlgorithmSettings(name="ppo"), "name"),
        (lambda: AlgorithmSettings(clip=0.2), "clip"),
        (lambda: MismatchSettings(low=3.0), r"low \(3.0\) is above high \(2.0\)"),
        (lambda: OverlongSettings(limit=10, margin=20), "margin of 20 tokens does not lie within a limit of 10"),
        (lambda: AlgorithmSettings(clip_high=math.inf), "clip_high"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: type[AlgorithmSettings], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        make()


def test_all_rounds_or_the_last_are_trained() -> None:
    assert weights(SAID, every, "t/0") == (0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0)
    assert weights(SAID, last, "t/0") == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert weights(Ledger(), last, "t/0") == ()


@given(ledger=ledgers())
def test_rounds_never_weigh_what_the_policy_did_not_write(ledger: Ledger) -> None:
    assert weights(ledger, every, "t/0") == tuple(map(float, ledger.mask))
    assert all(written or not weight for weight, written in zip(weights(ledger, last, "t"), ledger.mask, strict=True))


def test_a_function_of_ones_own_weighs_tokens_and_its_mistakes_are_told() -> None:
    def halved(ledger: Ledger) -> list[float]:
        return [written / 2 for written in ledger.mask]

    assert weights(SAID, halved, "t/0") == (0.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.5)
    for given_T, text in (
        ([1.0], "rollout t/0: wrong gave 1 weights for 7 tokens"),
        ([0, 0, math.nan, 0, 0, 0, 0], "gave token 2 a weight of nan"),
        ([0, 0, -1, 0, 0, 0, 0], "gave token 2 a weight of -1.0"),
        ([0, 0, 0, 1, 0, 0, 0], "gave token 3 a weight, and the tool wrote it"),
        (None, "rollout t/0: wrong gave None, and no list of 7 numbers"),
        (0.5, "wrong gave 0.5, and no list of 7 numbers"),
        ([0, None], "gave token 1 a weight of None, which is no number"),
        ((1 / 0 for _ in "x"), "wrong raised ZeroDivisionError: division by zero .*test_learn_settings.py:"),
    ):

        def wrong(ledger: Ledger, given_T: Any = given_T) -> Any:
            return given_T

        with pytest.raises(RoundsError, match=f"algorithm.credit.rounds: .*{text}") as told:
            weights(SAID, wrong, "t/0")
        assert "remedy: mend that function, and go on with --resume" in str(told.value)


def test_a_function_of_ones_own_that_ends_the_process_is_told_of_and_ends_nothing() -> None:
    def wrong(ledger: Ledger) -> list[float]:
        raise SystemExit(3)

    with pytest.raises(RoundsError, match="wrong raised SystemExit: 3"):
        weights(SAID, wrong, "t/0")


def test_what_is_left_out_of_the_settings_costs_nothing_and_replaces_nothing_with_any_algorithm() -> None:
    for name in get_args(Name):
        settings = AlgorithmSettings(name=name)
        assert (settings.dynamic, settings.overlong) == (False, None)
