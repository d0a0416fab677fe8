"""The file of token credits: kills, full disks and repeated steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from trainer.ledger import Author, Entry, Ledger
from trainer.rollout.rollout import Rollout, StopReason
from trainer.storage import token_credit
from trainer.storage.rollout_file import ROLLOUTS_FILE, RolloutWriter
from trainer.train.run_folder import RunFolder

ROLLOUT = Rollout(
    "t", Ledger((Entry(Author.TASK, (1, 2, 3)), Entry(Author.POLICY, (4, 5), logprobs=(-0.25, -1.5)))), StopReason.DONE
)


def write_run(folder: Path, *steps: int) -> None:
    """A run of which each step has a rollout, and said what it made of it."""
    with RolloutWriter(folder) as run:
        for step in steps:
            rollout = replace(ROLLOUT, group=f"{step}-0-0")
            run.add(rollout)
            run.add_credits(step, [Row(rollout.name)])


@dataclass
class Row:
    """What a step made of a rollout."""

    name: str
    advantages: tuple[float, ...] = (0.0, 0.5)
    weights: tuple[float, ...] = (0.0, 1.0)


def credit_steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / token_credit.CREDITS_FILE).read_text().splitlines()]


@pytest.mark.parametrize("step", range(4))
def test_credits_of_repeated_steps_are_replaced(step: int, tmp_path: Path) -> None:
    write_run(tmp_path, 1, 2, 3)
    before = (tmp_path / ROLLOUTS_FILE).stat().st_size
    RunFolder(tmp_path).truncate(before * step // 3, step)
    assert credit_steps(tmp_path) == [1, 2, 3][:step]
    write_run(tmp_path, *range(step + 1, 4))
    assert credit_steps(tmp_path) == [1, 2, 3] and (tmp_path / ROLLOUTS_FILE).stat().st_size == before
