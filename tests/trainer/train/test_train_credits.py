"""What steps made of their tokens stays true, whatever ends a run in the midst of a line, and wherever it goes on."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.ledger import Author, Entry, Ledger
from trainer.run import credits
from trainer.run.file import NAME, Rollouts, Writer, _append
from trainer.run.rollout import Rollout, StopReason
from trainer.train.folder import Folder

ROLLOUT = Rollout(
    "t", Ledger((Entry(Author.TASK, (1, 2, 3)), Entry(Author.POLICY, (4, 5), logprobs=(-0.25, -1.5)))), StopReason.DONE
)


def credited(folder: Path, *steps: int) -> None:
    """A run of which each step has a rollout, and said what it made of it."""
    with Writer(folder) as run:
        for step in steps:
            rollout = replace(ROLLOUT, group=f"{step}-0-0")
            run.add(rollout)
            run.credit(step, [Row(rollout.name)])


@dataclass
class Row:
    """What a step made of a rollout."""

    name: str
    advantages: tuple[float, ...] = (0.0, 0.5)
    weights: tuple[float, ...] = (0.0, 1.0)


CREDIT: Any = [[[1, 0.0, 0.0], [1, 0.5, 1.0]]]


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / credits.NAME).read_text().splitlines()]


@given(st.integers(min_value=1, max_value=60))
def test_half_a_line_of_credits_is_cut_off_and_spoils_no_other(cut: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        credited(folder, 1, 2)
        os.truncate(folder / credits.NAME, (folder / credits.NAME).stat().st_size - cut)
        credited(folder, 2, 3)
        assert steps_of(folder) == [1, 2, 3]
        assert [credits.Credits(folder).of_rollout(one) for one in Rollouts(folder)] == [CREDIT] * 4


def test_credits_on_a_full_disk_leave_no_half_a_line(tmp_path: Path) -> None:
    credited(tmp_path, 1)

    class Full(FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > before:
                raise OSError(28, "No space left on device")
            return super().write(data[:10])

    before = (tmp_path / credits.NAME).stat().st_size
    with Full(tmp_path / credits.NAME, "ab") as full, pytest.raises(OSError, match="No space"):
        _append(full, b"half of this line")
    assert (tmp_path / credits.NAME).stat().st_size == before


@pytest.mark.parametrize("step", range(4))
def test_credits_of_steps_that_are_made_again_do_not_stay(step: int, tmp_path: Path) -> None:
    credited(tmp_path, 1, 2, 3)
    before = (tmp_path / NAME).stat().st_size
    Folder(tmp_path).cut(before * step // 3, step)
    assert steps_of(tmp_path) == [1, 2, 3][:step]
    credited(tmp_path, *range(step + 1, 4))
    assert steps_of(tmp_path) == [1, 2, 3] and (tmp_path / NAME).stat().st_size == before


def test_a_run_without_credits_is_cut_as_well(tmp_path: Path) -> None:
    Folder(tmp_path).cut(0, 0)
    assert not (tmp_path / credits.NAME).exists()
