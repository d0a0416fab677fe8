"""`make moves` tells which scripts are read as bash reads them, and which are translated."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import moves
from tests.conftest import Write

SCRIPT = r"""
N=4
if [ "$1" = big ]; then N=8; fi
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['rows.parquet']" \
    data.train_batch_size=$N \
    actor_rollout_ref.actor.ppo_mini_batch_size=$N \
    actor_rollout_ref.model.path=some/model \
    trainer.total_training_steps=3
"""


def test_table_of_a_folder(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("a/good.sh", SCRIPT)
    write("a/b/bad.sh", SCRIPT.replace("train_batch_size", "train_batch_sighs"))
    write("a/unknown.sh", f"rsync a b\n{SCRIPT}")
    write("a/other.sh", "python3 train.py")
    rows = {row.script: moves.print_row(row) for row in moves.check_folder(tmp_path / "a", added=[])}
    assert {name: row.outcome for name, row in rows.items()} == {
        "b/bad.sh": "refused", "good.sh": "translated", "unknown.sh": "refused"
    }  # fmt: skip
    assert rows["good.sh"].argv in ("equal", "-") and rows["b/bad.sh"].reasons[0].startswith("data.train_batch_sighs: ")
    moves.print_sums(list(rows.values()))
    assert "translated 1, refused 2" in capsys.readouterr().out


def test_unknown_text_is_equal_to_anything() -> None:
    assert moves.are_equal([("a", "b=x�y")], [["a", "b=x123y"]])
    assert not moves.are_equal([("a", "b=x�y")], [["a", "b=123y"]])
    assert not moves.are_equal([("a",)], []) and not moves.are_equal([("a",)], [["a", "b"]])
